"""Image files of any kind, made into images of a data set's. Not a command of its own."""

import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from utils.datasets.sources import IMAGE_SIZE
from utils.errors import UserError
from utils.pictures import NoPillow

# What Pillow reads by itself: for EPS it would start Ghostscript, which runs what the file says.
FORMATS = ("PNG", "JPEG", "MPO", "GIF", "BMP", "TIFF", "WEBP", "AVIF", "JPEG2000", "PPM", "ICO")
WORKING_SIZE = 280  # pixels: larger images are shrunk first, which also smooths a photo's grain
MIN_CONTRAST = 25  # of 255
PAPER = 0.2  # share of the darkest ink up to which all is paper: its grain, shadows


class InputError(UserError):
    """A file that cannot be used; the message says why."""

    exit_status = 2


def read_image(path: Path) -> Tensor:
    """Return the grey levels of an image file, float [H, W], 0 (black) to 255 at most.

    Upright as the camera held it; what is transparent becomes white.

    Raises:
        InputError: not there, or not an image.
        NoPillow: it cannot be imported.
    """
    try:
        import numpy as np
        from PIL import Image, ImageOps
    except ImportError as error:
        raise NoPillow("reading images") from error
    if not path.exists():
        raise InputError("does not exist")
    if not path.is_file():  # a pipe would be waited for without an end
        raise InputError("is not a file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what an image says of itself beside its pixels
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as file:
                if file.format not in FORMATS:
                    raise InputError(f"is {file.format}: convert it to PNG")
                image = ImageOps.exif_transpose(file)
        if image.mode[0] in "IF":  # 16 bits or more, which a conversion would cut off at 255
            levels = torch.from_numpy(np.asarray(image).astype(np.float32))
            if not levels.isfinite().all():
                raise InputError("has pixels that are not finite numbers")
            return levels * (255 / levels.max().clamp(min=1))
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        grey = image.convert("L")
    except InputError:
        raise
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise InputError(
            f"has more than {Image.MAX_IMAGE_PIXELS:,} pixels: shrink it first"
        ) from None
    except Exception as error:  # a damaged image fails in many ways
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"cannot be read as an image ({reason})") from error
    levels = torch.frombuffer(bytearray(grey.tobytes()), dtype=torch.uint8)
    return levels.view(grey.height, grey.width).float()


def resize(pixels: Tensor, longer_side: int) -> Tensor:
    """Scale [H, W] so that its longer side has so many pixels, smoothing where it shrinks."""
    factor = longer_side / max(pixels.shape)
    size = [max(1, round(side * factor)) for side in pixels.shape]
    return F.interpolate(pixels[None, None], size, mode="bilinear", antialias=True)[0, 0]


def normalise(pixels: Tensor, box: int) -> Tensor:
    """Turn grey levels [H, W] into an image of the data set, uint8 [28, 28], light on dark.

    As MNIST was made (http://yann.lecun.com/exdb/mnist): what is drawn is fitted into ``box`` x
    ``box`` pixels and its centre of mass put into the middle. What the border shows is the
    background.

    Raises:
        InputError: nothing is drawn.
    """
    size = IMAGE_SIZE
    is_final = pixels.shape == (size, size)
    if max(pixels.shape) > WORKING_SIZE:
        pixels = resize(pixels, WORKING_SIZE)
    border = torch.cat([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]]).median()
    darker, lighter = border - pixels.min(), pixels.max() - border
    if max(darker, lighter) < MIN_CONTRAST:
        raise InputError("shows nothing: all of it has about the same grey")
    if is_final:
        return (255 - pixels if darker > lighter else pixels).round().to(torch.uint8)
    ink = (border - pixels if darker > lighter else pixels - border).clamp(min=0)
    ink[ink < PAPER * ink.max()] = 0
    rows, columns = ink.amax(1).nonzero(), ink.amax(0).nonzero()
    ink = resize(ink[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1], box)
    ink *= 255 / ink.max()  # a thin line fades when it shrinks
    canvas = torch.zeros(size, size)
    top, left = (
        # To whole pixels, and never over the edge.
        int(((size - 1) / 2 - centre).round().clamp(0, size - side))
        for centre, side in zip(centre_of_mass(ink), ink.shape, strict=True)
    )
    canvas[top : top + ink.shape[0], left : left + ink.shape[1]] = ink
    return canvas.round().to(torch.uint8)


def centre_of_mass(ink: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row and the column."""
    rows, columns = ink.sum(1), ink.sum(0)
    return tuple((m * torch.arange(len(m))).sum() / m.sum() for m in (rows, columns))  # type: ignore[return-value]
