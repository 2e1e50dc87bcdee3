"""Pictures of an episode as a GIF or an MP4; the ending of the file's name chooses."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
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
        self._encoder: subprocess.Popen[bytes] | None = None

    def append(self, frame: np.ndarray) -> None:
        if self._encoder is None:
            self._encoder = self._begin(frame.shape[1], frame.shape[0])
        assert self._encoder.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; `close` says why
            self._encoder.stdin.write(np.ascontiguousarray(frame, np.uint8).tobytes())

    def _begin(self, width: int, height: int) -> subprocess.Popen[bytes]:
        import imageio_ffmpeg

        frames = f"-f rawvideo -pix_fmt rgb24 -s {width}x{height} -r {FRAMES_PER_S} -i -"
        # Players want even numbers of rows and columns.
        encoding = "-vf pad=ceil(iw/2)*2:ceil(ih/2)*2 -vcodec libx264 -pix_fmt yuv420p"
        command = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-loglevel", "error"]
        command += [*frames.split(), *encoding.split(), f"file:{self._path}"]
        # Not by that library's own writer, which forks a process full of jax's threads. A group of
        # its own: Ctrl-C is for the one that plays.
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
        )

    def close(self) -> str:
        assert self._encoder is not None
        _, said = self._encoder.communicate()
        if self._encoder.returncode == 0:
            return ""
        return f"{self._path} could not be written: {said.decode(errors='replace').strip()}"
