"""One thread for every test: the machines that run them are shared, and the matrices are small."""

import torch

torch.set_num_threads(1)
