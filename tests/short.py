"""The synthetic set with few test images, for runs that are compared: to evaluate takes longest."""

from pathlib import Path

from utils.datasets import prepare


def make(folder: Path, count: int, data_dir: Path) -> Path:
    """Make a data folder in ``folder`` with the first ``count`` test images of the whole set."""
    whole = prepare.prepare("synthetic", str(data_dir))
    tensors = prepare.load_prepared(whole)
    del tensors["crc32"]
    tensors |= {key: tensors[key][:count].clone() for key in ("test_images", "test_labels")}
    path = folder / whole.relative_to(data_dir)
    path.parent.mkdir(parents=True)
    prepare._write(path, "synthetic", tensors)
    return folder
