"""Pictures of an episode as a GIF or an MP4; the ending of the file's name chooses."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from spmdrl.config import ConfigError

__all__ = ["Gif", "Mp4", "Video", "check_video_file", "open_video"]

FRAMES_PER_S = 30
LONGEST_GIF = 3000  # frames, which are kept in memory until the file is written
NEEDS = {".gif": ("PIL", "Pillow"), ".mp4": ("imageio_ffmpeg", "imageio-ffmpeg")}


class Video(Protocol):
    def append(self, frame: np.ndarray) -> None: ...
    def close(self) -> str:
        """Write it; what the user must know about it, if anything."""


def check_video_file(path: str) -> None:
    """Before anything is played: whether such a file can be written here."""
    ending = Path(path).suffix.lower()
    if ending not in NEEDS:
        raise ConfigError(f"--video {path}: the name must end in .gif or .mp4")
    module, package = NEEDS[ending]
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"--video {path} needs {package}: pip install 'spmdrl[video]'")
    folder = Path(path).parent
    if not folder.is_dir():
        raise ConfigError(f"--video {path}: there is no folder {folder}")


def open_video(path: str) -> Video:
    return Mp4(path) if Path(path).suffix.lower() == ".mp4" else Gif(path)


class Gif:
    def __init__(self, path: str, longest: int = LONGEST_GIF):
        self._path, self._longest = path, longest
        self._pictures: list[Any] = []
        self._seen = 0

    def append(self, frame: np.ndarray) -> None:
        from PIL import Image

        self._seen += 1
        if self._seen <= self._longest:
            picture = Image.fromarray(frame)
            # One byte per pixel instead of three, as the file will have it.
            self._pictures.append(picture.convert("P", palette=Image.Palette.ADAPTIVE))

    def close(self) -> str:
        first, *others = self._pictures
        first.save(
            self._path, save_all=True, append_images=others, duration=1000 // FRAMES_PER_S, loop=0
        )
        if self._seen <= self._longest:
            return ""
        return (
            f"{self._path} holds the first {self._longest} of the episode's {self._seen} frames; "
            "an .mp4 holds all"
        )


class Mp4:
    """Encoded frame by frame, so an episode may be of any length."""

    def __init__(self, path: str):
        self._path = path
        self._encoder: Any = None

    def append(self, frame: np.ndarray) -> None:
        if self._encoder is None:
            self._encoder = self._begin(frame.shape[1], frame.shape[0])
        self._encoder.send(np.ascontiguousarray(frame, np.uint8))

    def _begin(self, width: int, height: int) -> Any:
        import imageio_ffmpeg

        encoder = imageio_ffmpeg.write_frames(
            self._path,
            (width, height),
            fps=FRAMES_PER_S,
            macro_block_size=2,  # players want even numbers of rows and columns
            ffmpeg_log_level="error",
        )
        encoder.send(None)
        return encoder

    def close(self) -> str:
        with contextlib.suppress(StopIteration):
            self._encoder.close()
        return ""
