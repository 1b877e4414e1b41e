"""What a person reads who mistyped something."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration


def rookery(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("setting", "answer"),
    [
        ("learner.batchsize=64", "unknown key learner.batchsize; did you mean learner.batch_size?"),
        ("learner.gamma=1.5", "learner.gamma = 1.5: input should be less than 1"),
        ("replay.min_steps=999999999", "nothing could ever be drawn"),
    ],
)
def test_train_wrong_config_names_the_problem_and_exits_2(tmp_path: Path, setting: str, answer: str) -> None:
    """Nothing is started or created: the message says which key, which value, what is allowed."""
    run_dir = tmp_path / "run"
    ended = rookery("rookery.cli", "train", "--run-dir", str(run_dir), "--set", setting)
    assert ended.returncode == 2
    assert answer in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not run_dir.exists()


def test_service_wrong_config_names_the_problem_and_exits_2(tmp_path: Path) -> None:
    """A single service refuses a wrong key just as `rookery train` does."""
    ended = rookery("services.replay", "--run-dir", str(tmp_path), "--set", "replay.capcity_steps=5")
    assert ended.returncode == 2
    assert "did you mean replay.capacity_steps?" in ended.stderr
    assert list(tmp_path.iterdir()) == []
