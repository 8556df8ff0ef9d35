"""Ask a trained network: about image files, or about the test set it never saw.

    python scripts/tools/predict.py runs/single-20260101-120000 digit.png
    python scripts/tools/predict.py runs/single-20260101-120000 --test
    python scripts/tools/predict.py runs/single-20260101-120000 --export digits.pt2
    python scripts/tools/predict.py digits.pt2 digit.png

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

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from photo import InputError, normalise, read_image
from torch import Tensor, nn

import data
import models
from utils.checkpoint import read_checkpoint
from utils.config import MAX_THREADS, OneLineParser, number
from utils.device import Precision, select_devices, setup_device
from utils.errors import UsageError, guard, printable
from utils.pictures import draw_mistakes
from utils.weights import match_weights

CLASSES = {
    "fashion-mnist": (
        *("T-shirt", "trouser", "pullover", "dress", "coat"),
        *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
    )
}
BOX = {"fashion-mnist": 28}  # pixels, the longer side of what is shown; 20 for digits
MAX_MISTAKES = 400
# Of a run's flags and its result, with their types; in another precision a few predictions differ.
TOLD = {"amp": str, "data_dir": str, "test_correct": int, "global_step": int}
PRECISIONS = ("off", "bf16", "fp16")
IDENTITY = "identity.json"  # what an exported file says of itself
CHECKED = 1000  # test images that an exported file has to answer like its original
TOLERANCE = 1e-4  # of a probability, for other kernels than the original's


class Classifier(nn.Module):
    """A network with the normalisation of its images: bytes in, logits out.

    What leaves the training goes by this form, so that nobody has to know mean and standard
    deviation of the data set.

    Args:
        model: takes images as ``data.Transform`` returns them, and returns logits [B, C].
        dataset: a key of ``data.SOURCES``, for the normalisation.
        device: where the model is.
    """

    def __init__(self, model: nn.Module, dataset: str, device: torch.device) -> None:
        super().__init__()
        self.model = model
        self.transform = data.Transform(device, dataset)

    def forward(self, images: Tensor) -> Tensor:
        """Take images uint8 [B, 28, 28], light on dark, and return logits [B, C]."""
        pixels, _ = self.transform(images, images)  # there are no labels
        return self.model(pixels)


@torch.inference_mode()
def probabilities_of(classifier: nn.Module, images: Tensor, precision: Precision) -> Tensor:
    """Return the probabilities [N, C], on the CPU, of images uint8 [N, 28, 28].

    In the batches of the evaluation, and in float64, in which no two logits round to one
    probability: so the predictions are those that the evaluation counts.
    """
    logits = []
    for batch in images.split(data.EVAL_BATCH_SIZE):
        with precision.autocast():
            logits.append(classifier(batch).cpu().double())
    return torch.cat(logits).softmax(1)


@dataclass
class Trained:
    """A network to ask, and what is known of it.

    Attributes:
        classifier: takes images uint8 [B, 28, 28], returns logits [B, C].
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
    name, dataset = known_names(state["identity"], path)
    model = models.build_model(name)
    report = match_weights(model.state_dict(), state["model"])
    if report.problems:
        raise InputError(f"{path} does not fit {name} in models.py: {report.problems[0]}")
    model.load_state_dict(state["model"])
    classifier = Classifier(model.to(device), dataset, device).eval()
    run = read_run(path.parent.parent) if path.parent.name == "checkpoints" else {}
    return Trained(classifier, dataset, name, device, run, state["progress"]["global_step"])


def known_names(identity: Any, path: Path) -> tuple[str, str]:
    """Return the model and the data set that a file names.

    Raises:
        InputError: this project has none of these names.
    """
    identity = identity if isinstance(identity, dict) else {}
    model, dataset = str(identity.get("model")), str(identity.get("dataset"))
    if model not in models.MODELS:
        raise InputError(f"{path} holds a model {model}: add it to MODELS in models.py")
    if dataset not in data.SOURCES:
        raise InputError(f"{path} was trained on {dataset}: add it to SOURCES, for the images")
    return model, dataset


def read_run(folder: Path) -> dict[str, Any]:
    """Return what a run directory says under the names of ``TOLD``, as far as it does."""
    found: dict[str, Any] = {}
    for name in ("args.json", "summary.json"):
        path = folder / name
        try:
            content = json.loads(path.read_text()) if path.is_file() else None  # no pipe
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(content, dict):
            kept = {name: content.get(name) for name in TOLD}
            found |= {name: v for name, v in kept.items() if isinstance(v, TOLD[name])}
    return found


def load_exported(path: Path) -> Trained:
    """Load a file that ``--export`` wrote; it computes on the CPU.

    Loading can run what the file holds: PyTorch reads these without ``weights_only``.
    """
    if not path.exists():
        raise InputError(f"{path} does not exist")
    if not path.is_file():  # a pipe would be waited for without an end
        raise InputError(f"{path} is not a file")
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith(IDENTITY)]
            if not names or archive.testzip() is not None:
                raise InputError(f"{path} is damaged, or not a file that --export wrote")
            identity = json.loads(archive.read(names[0]))
        name, dataset = known_names(identity, path)
        program = torch.export.load(path)
    except InputError:
        raise
    except Exception as error:  # what is no archive fails in zipfile, zlib and torch alike
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{path} is not a file that --export wrote ({reason})") from error
    return Trained(program.module(), dataset, name, torch.device("cpu"), {})


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
    again, precision = load_exported(path), Precision(trained.device, "off")
    worst = 0.0
    for some in (images[:1], images[:7], images):
        ours, theirs = (probabilities_of(t.classifier, some, precision) for t in (trained, again))
        worst = max(worst, float((ours - theirs).abs().max()))
    if not worst <= TOLERANCE:
        raise InputError(f"{path} differs from the original by {worst:.1g}: do not use it")
    return worst


def describe(probabilities: Tensor, dataset: str) -> str:
    """Name the two likeliest classes of ``probabilities`` [C]."""
    names = CLASSES.get(dataset, tuple(map(str, range(len(probabilities)))))
    (first, second), (best, runner_up) = (part.tolist() for part in probabilities.topk(2))
    return f"{names[best]} ({first:.1%}), then {names[runner_up]} ({second:.1%})"


def run_test(trained: Trained, test_set: data.ImageSet, precision: Precision, sheet: Path) -> None:
    """Print the accuracy on the test set, and draw the mistakes."""
    probabilities = probabilities_of(trained.classifier, test_set.images, precision)
    confidences, predictions = probabilities.max(1)
    correct, count = int((predictions == test_set.labels).sum()), len(test_set)
    print(f"{trained.dataset} test set: {correct:,} of {count:,} correct, {correct / count:.2%}")
    told = trained.run.get("test_correct")
    if trained.run.get("global_step") == trained.step and told not in (None, correct):
        print(f"summary.json says {told:,}: another device rounds otherwise", file=sys.stderr)
    picture = draw_mistakes(
        test_set.images, test_set.labels, predictions, confidences, MAX_MISTAKES
    )
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
    device = torch.device("cpu") if args.export else select_devices(args.device)[0]
    setup_device(device, args.threads)
    trained = load(args.model, device)
    amp = trained.run.get("amp")
    precision = Precision(trained.device, amp if amp in PRECISIONS else "off")
    status = 0
    for path in args.images:
        try:
            image = normalise(read_image(path), BOX.get(trained.dataset, 20))
        except InputError as error:  # the other images are none the worse for it
            print(f"predict.py: error: {printable(str(path))} {error}", file=sys.stderr)
            status = error.exit_status
            continue
        probabilities = probabilities_of(trained.classifier, image[None], precision)[0]
        print(f"{printable(str(path))}: {describe(probabilities, trained.dataset)}")
    if args.test or args.export:
        data_dir = args.data_dir or trained.run.get("data_dir", "data")
        test_set = data.load_dataset(trained.dataset, data_dir)[1]
    if args.test:
        folder = args.model if args.model.is_dir() else args.model.parent
        run_test(trained, test_set, precision, args.mistakes or folder / "mistakes.png")
    if args.export:
        worst = export(trained, args.export, test_set.images[:CHECKED])
        print(
            f"{args.export}: images uint8 [B, 28, 28] in, logits [B, C] out; differs by"
            f" {worst:.1g} at most on {CHECKED:,} test images"
        )
    return status


def main() -> int:
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="run directory, checkpoint, or exported .pt2")
    parser.add_argument("images", type=Path, nargs="*", help="PNG, JPEG, ...")
    parser.add_argument("--test", action="store_true", help="predict the whole test set")
    parser.add_argument("--mistakes", type=Path, help="picture to write (mistakes.png beside it)")
    parser.add_argument("--export", type=Path, metavar="FILE.pt2", help="write it for torch.export")
    parser.add_argument("--data-dir", help="of the test set (default: the run's)")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "mps", "xpu"])
    threads = number(int, least=1, most=MAX_THREADS)
    parser.add_argument("--threads", type=threads, help="CPU threads")
    args = parser.parse_args()
    return guard(run, args)


if __name__ == "__main__":
    sys.exit(main())
