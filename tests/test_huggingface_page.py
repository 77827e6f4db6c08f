"""docs/huggingface.md: the loop that people have and the one that they get train the same model."""

import re

from processes import ROOT, python, unmerged


def test_the_two_scripts_of_the_page_train_the_same_model(tmp_path):
    page = (ROOT / "docs" / "huggingface.md").read_text()
    scripts = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", page, re.DOTALL))
    assert scripts.keys() == {"before", "after"}
    changed = set(scripts["after"].splitlines()) - set(scripts["before"].splitlines())
    assert len(changed) <= 20
    said = {}
    for name, text in scripts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.py").write_text(text)
        done = python(f"{name}.py", cwd=tmp_path / name, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
        assert done.returncode == 0, done.stderr
        said[name] = done.stdout
    assert said["after"] == said["before"] and (tmp_path / "after" / "trained" / "config.json").is_file()
    launched = python("-m", "rpc_pipe", "run", "after.py", "--workers", 2, cwd=tmp_path / "after", PYTHONPATH=str(ROOT))
    assert unmerged(launched.stdout).count(said["before"].strip()) == 2, launched.stdout + launched.stderr
