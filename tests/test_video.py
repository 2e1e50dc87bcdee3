"""Episodes as GIF and MP4 are whole, or it is said what is missing."""

from __future__ import annotations

import numpy as np
import pytest

from spmdrl.config import ConfigError
from spmdrl.runtime import video
from spmdrl.runtime.video import Gif, check_video_file, open_video


def frames(count: int) -> list[np.ndarray]:
    """Each with a bar of its own: GIF joins frames that are equal."""
    made = [np.zeros((21, 32, 3), np.uint8) for _ in range(count)]
    for i, frame in enumerate(made):
        frame[:, i % 32] = (255, 8 * (i // 32), 0)
    return made


def written(path: str, count: int) -> str:
    film = open_video(path)
    for frame in frames(count):
        film.append(frame)
    return film.close()


def test_a_gif_has_every_frame(tmp_path):
    from PIL import Image

    path = str(tmp_path / "a.gif")
    assert written(path, 70) == ""
    with Image.open(path) as picture:
        assert picture.n_frames == 70  # type: ignore[attr-defined]
        assert picture.size == (32, 21)
        first = np.asarray(picture.convert("RGB"))
    assert (first == frames(1)[0]).all()


def test_what_is_cut_off_is_said(tmp_path):
    from PIL import Image

    film = Gif(str(tmp_path / "a.gif"), longest=5)
    for frame in frames(9):
        film.append(frame)
    assert "holds the first 5 of the episode's 9 frames" in film.close()
    with Image.open(tmp_path / "a.gif") as picture:
        assert picture.n_frames == 5  # type: ignore[attr-defined]


def test_an_mp4_has_every_frame_however_many(tmp_path):
    ffmpeg = pytest.importorskip("imageio_ffmpeg", reason="part of the extra `video`")
    path = str(tmp_path / "a.mp4")
    assert written(path, 70) == ""
    count, seconds = ffmpeg.count_frames_and_secs(path)
    assert count == 70
    assert seconds == pytest.approx(70 / video.FRAMES_PER_S, abs=0.05)


@pytest.mark.parametrize(
    ("name", "said"),
    [("a.avi", "must end in .gif or .mp4"), ("a", "must end"), ("no/a.gif", "there is no folder")],
)
def test_other_names_are_refused_before_anything_is_played(tmp_path, name, said):
    with pytest.raises(ConfigError, match=said):
        check_video_file(str(tmp_path / name))


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setattr(video.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"imageio-ffmpeg: pip install 'spmdrl\[video\]'"):
        check_video_file("a.mp4")


def test_an_mp4_that_cannot_be_written_is_said(tmp_path):
    pytest.importorskip("imageio_ffmpeg", reason="part of the extra `video`")
    (tmp_path / "a.mp4").mkdir()
    assert "a.mp4 could not be written: " in written(str(tmp_path / "a.mp4"), 400)
