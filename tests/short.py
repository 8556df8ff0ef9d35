"""The synthetic set with few test images, for runs that are compared: to evaluate takes longest."""

from utils.datasets import idx
from utils.datasets.prepare import prepare


def make(folder, count, data_dir):
    """Make a data folder in ``folder`` with the first ``count`` test images of the whole set."""
    whole = prepare("synthetic", str(data_dir))
    raw = folder / whole.relative_to(data_dir)
    raw.mkdir(parents=True)
    for path in whole.iterdir():
        part = count if path.name.startswith("t10k") else None
        (raw / path.name).write_bytes(idx.to_bytes(idx.read(path)[:part]))
    return folder
