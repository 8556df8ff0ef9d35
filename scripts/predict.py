"""Ask a trained network: about image files, or about the test set it never saw.

    python scripts/predict.py runs/single-20260101-120000 digit.png
    python scripts/predict.py runs/single-20260101-120000 --test
    python scripts/predict.py runs/single-20260101-120000 --export digits.pt2
    python scripts/predict.py digits.pt2 digit.png

Takes the run directory or a checkpoint of any of the three scripts. An image may be of any size,
in colour or grey, dark on light or light on dark. It is made into what the data set consists of:
grey, light on dark, cut to what is drawn, scaled so that the longer side has 20 pixels, and its
centre of mass put into the middle of 28 x 28 pixels. One of 28 x 28 is taken to be in that form.
"""

import argparse
import json
import sys
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import Tensor, nn

import data
import models
from utils import runtime
from utils.answers import Classifier, answer, draw_mistakes
from utils.checkpoint import FORMAT, CheckpointError, match_weights, read_checkpoint
from utils.config import OneLineParser, UsageError
from utils.photo import InputError, normalise, read_image

CLASSES = {
    "fashion-mnist": (
        *("T-shirt", "trouser", "pullover", "dress", "coat"),
        *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
    )
}
BOX = {"fashion-mnist": 28}  # pixels, the longer side of what is shown; 20 for digits
MAX_MISTAKES = 400
IDENTITY = "identity.json"  # what an exported file says of itself
CHECKED = 1000  # test images that an exported file has to answer like its original
TOLERANCE = 1e-4  # of a probability, for other kernels than the original's


@dataclass
class Trained:
    """A network to ask, and what is known of it.

    Attributes:
        classifier: takes images uint8 [B, 28, 28], returns logits [B, 10].
        dataset: that it was trained on.
        model: its name in ``models.MODELS``.
        device: where it computes.
        run: what the run directory says, flags and summary; empty without one.
        step: optimizer steps behind it; None in an exported file.
    """

    classifier: nn.Module
    dataset: str
    model: str
    device: torch.device
    run: dict[str, Any]
    step: int | None = None


def load(path: Path, device: torch.device) -> Trained:
    """Load a run directory, a checkpoint or an exported file.

    Raises:
        InputError, CheckpointError: not there, or not one of these.
    """
    if path.is_dir():
        path = path / "checkpoints" / "last.pt"
        if not path.exists():
            raise InputError(
                f"{path.parent.parent} is no run directory: it has no checkpoints/last.pt"
            )
    if path.suffix == ".pt2":
        return load_exported(path)
    state = read_checkpoint(path)
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is not a checkpoint of this project: train from it with --init-weights, or"
            " name a run directory"
        )
    name, dataset = state["identity"]["model"], state["identity"]["dataset"]
    if name not in models.MODELS:
        raise InputError(f"{path} holds a model {name}: add it to MODELS in models.py")
    model = models.build_model(name)
    report = match_weights(model.state_dict(), state["model"])
    if report.problems:
        raise InputError(f"{path} does not fit {name} in models.py: {report.problems[0]}")
    model.load_state_dict(state["model"])
    classifier = Classifier(model.to(device), dataset, device).eval()
    run = read_run(path.parent.parent) if path.parent.name == "checkpoints" else {}
    return Trained(classifier, dataset, name, device, run, state["progress"]["global_step"])


def read_run(folder: Path) -> dict[str, Any]:
    """Return the flags and the result that a run directory holds, as far as there are any."""
    found: dict[str, Any] = {}
    for name in ("args.json", "summary.json"):
        try:
            found |= json.loads((folder / name).read_text())
        except (OSError, ValueError):
            continue
    return found


def load_exported(path: Path) -> Trained:
    """Load a file that ``--export`` wrote; it computes on the CPU.

    Loading can run what the file holds: PyTorch reads these without ``weights_only``.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith(IDENTITY)]
            if not names or archive.testzip() is not None:
                raise InputError(f"{path} is damaged, or not a file that --export wrote")
            identity = json.loads(archive.read(names[0]))
        program = torch.export.load(path)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except (OSError, RuntimeError, ValueError, zipfile.BadZipFile) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{path} is not a file that --export wrote ({reason})") from error
    cpu = torch.device("cpu")
    return Trained(program.module(), identity["dataset"], identity["model"], cpu, {})


def export(trained: Trained, path: Path, images: Tensor) -> float:
    """Write the network with its normalisation, load it again, and compare the two.

    Args:
        trained: on the CPU.
        path: ends in .pt2.
        images: uint8 [N, 28, 28], to compare on, in batches of several sizes.

    Returns:
        The largest difference between two probabilities.

    Raises:
        InputError: the file cannot be written, or answers something else.
    """
    batch = torch.export.Dim("batch")
    program = torch.export.export(
        trained.classifier, (images[:2],), dynamic_shapes={"images": {0: batch}}, strict=False
    )
    identity = {"model": trained.model, "dataset": trained.dataset}
    try:
        with warnings.catch_warnings():  # about tensors in another order of memory, which are whole
            warnings.simplefilter("ignore")
            torch.export.save(program, path, extra_files={IDENTITY: json.dumps(identity)})
    except (OSError, RuntimeError) as error:
        raise InputError(f"cannot write {path}: {error}".splitlines()[0]) from error
    again, precision = load_exported(path), runtime.Precision(trained.device, "off")
    worst = 0.0
    for some in (images[:1], images[:7], images):
        ours, theirs = (answer(t.classifier, some, precision) for t in (trained, again))
        worst = max(worst, float((ours - theirs).abs().max()))
    if not worst <= TOLERANCE:
        raise InputError(f"{path} differs from the original by {worst:.1g}: do not use it")
    return worst


def describe(probabilities: Tensor, dataset: str) -> str:
    """Name the two likeliest classes of ``probabilities`` [10]."""
    names = CLASSES.get(dataset, tuple(map(str, range(data.NUM_CLASSES))))
    (first, second), (best, runner_up) = (part.tolist() for part in probabilities.topk(2))
    return f"{names[best]} ({first:.1%}), then {names[runner_up]} ({second:.1%})"


def run_test(
    trained: Trained, test_set: data.ImageSet, precision: runtime.Precision, sheet: Path
) -> None:
    """Print the accuracy on the test set, and draw the mistakes."""
    probabilities = answer(trained.classifier, test_set.images, precision)
    correct, count = int((probabilities.argmax(1) == test_set.labels).sum()), len(test_set)
    print(f"{trained.dataset} test set: {correct:,} of {count:,} correct, {correct / count:.2%}")
    told = trained.run.get("test_correct")
    if trained.run.get("global_step") == trained.step and told not in (None, correct):
        print(f"summary.json says {told:,}: another device rounds otherwise", file=sys.stderr)
    picture = draw_mistakes(test_set.images, test_set.labels, probabilities, MAX_MISTAKES)
    try:
        picture.save(sheet)
    except (OSError, ValueError) as error:  # ValueError: an ending that Pillow does not know
        raise InputError(f"cannot write {sheet}: {error}") from error
    print(f"the mistakes are in {sheet}")


def run(args: argparse.Namespace) -> int:
    if not (args.images or args.test or args.export):
        raise UsageError("nothing to do: name an image, or pass --test or --export FILE.pt2")
    if args.export and (args.export.suffix != ".pt2" or args.model.suffix == ".pt2"):
        raise UsageError("--export writes a FILE.pt2, from a run directory or a checkpoint")
    device = torch.device("cpu") if args.export else runtime.select_devices(args.device)[0]
    runtime.setup_device(device, args.threads)
    trained = load(args.model, device)
    # As in the training: in another precision a few answers differ.
    precision = runtime.Precision(trained.device, trained.run.get("amp", "off"))
    status = 0
    for path in args.images:
        try:
            image = normalise(read_image(path), BOX.get(trained.dataset, 20))
        except InputError as error:  # the other images are none the worse for it
            print(f"predict.py: error: {path} {error}", file=sys.stderr)
            status = error.exit_status
            continue
        probabilities = answer(trained.classifier, image[None], precision)[0]
        print(f"{path}: {describe(probabilities, trained.dataset)}")
    if args.test or args.export:
        data_dir = args.data_dir or trained.run.get("data_dir", "data")
        test_set = data.load_dataset(trained.dataset, data_dir)[1]
    if args.test:
        folder = args.model if args.model.is_dir() else args.model.parent
        run_test(trained, test_set, precision, args.mistakes or folder / "mistakes.png")
    if args.export:
        worst = export(trained, args.export, test_set.images[:CHECKED])
        print(
            f"{args.export}: images uint8 [B, 28, 28] in, logits [B, 10] out; differs by"
            f" {worst:.1g} at most on {CHECKED:,} test images"
        )
    return status


def main() -> int:
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="run directory, checkpoint, or exported .pt2")
    parser.add_argument("images", type=Path, nargs="*", help="PNG, JPEG, ...")
    parser.add_argument("--test", action="store_true", help="answer the whole test set")
    parser.add_argument("--mistakes", type=Path, help="picture to write (mistakes.png beside it)")
    parser.add_argument("--export", type=Path, metavar="FILE.pt2", help="write it for torch.export")
    parser.add_argument("--data-dir", help="of the test set (default: the run's)")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "mps", "xpu"])
    parser.add_argument("--threads", type=int, help="CPU threads")
    args = parser.parse_args()
    return runtime.guard(run, args)


if __name__ == "__main__":
    sys.exit(main())
