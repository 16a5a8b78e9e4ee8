"""psgd: preconditioned SGD, with the preconditioner P = QᵀQ fitted online on a Lie group."""

from psgd.algebra import MatrixAlgebra as MatrixAlgebra
from psgd.algebra import Orthogonal as Orthogonal
from psgd.group import Group as Group
from psgd.group import Point as Point
from psgd.group import Residual as Residual
from psgd.groups.blocks import Blocks as Blocks
from psgd.groups.circulant import Circulant as Circulant
from psgd.groups.conjugate import Conjugate as Conjugate
from psgd.groups.constant import DCT as DCT
from psgd.groups.constant import Identity as Identity
from psgd.groups.constant import Permute as Permute
from psgd.groups.constant import Shift as Shift
from psgd.groups.dense import Dense as Dense
from psgd.groups.diagonal import Diagonal as Diagonal
from psgd.groups.diagonal import Scalar as Scalar
from psgd.groups.direct_sum import DirectSum as DirectSum
from psgd.groups.incomplete_triangular import IncompleteTriangular as IncompleteTriangular
from psgd.groups.involution import Butterfly as Butterfly
from psgd.groups.involution import XMat as XMat
from psgd.groups.kronecker import Kronecker as Kronecker
from psgd.groups.low_rank import LowRank as LowRank
from psgd.groups.named import affine as affine
from psgd.groups.named import band as band
from psgd.groups.named import dct as dct
from psgd.groups.named import fishnet as fishnet
from psgd.groups.named import kaleidoscope as kaleidoscope
from psgd.groups.named import lra as lra
from psgd.groups.named import lra_duv as lra_duv
from psgd.groups.named import two_grid as two_grid
from psgd.groups.normalization import Normalization as Normalization
from psgd.groups.padded import Padded as Padded
from psgd.groups.permutation import permutation as permutation
from psgd.groups.product import Product as Product
from psgd.groups.triangular import LowerTriangular as LowerTriangular
from psgd.groups.triangular import Triangular as Triangular
from psgd.step_size import Normalized as Normalized
from psgd.step_size import Smoothed as Smoothed
from psgd.step_size import StepSize as StepSize

__version__ = "0.1.0"
