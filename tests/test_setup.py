"""The role of setup/ and what is said of it. setup/test plays all of it on a bare Debian; this reads it."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

from nbguard.frontend.cli import command_parser
from nbguard.frontend.notebook.startup import FILE

ROOT = Path(__file__).parents[1]
SETUP = ROOT / "setup"
TASKS = (SETUP / "roles/nbguard/tasks/main.yml").read_text(encoding="utf-8")
README = (SETUP / "README.md").read_text(encoding="utf-8")
DOCKERFILE = (SETUP / "Dockerfile").read_text(encoding="utf-8")


def test_the_tags_are_those_that_the_readme_names() -> None:
    (named,) = re.findall(r"^Tags: ([^.]*)\.", README, re.MULTILINE)

    assert re.findall(r"^  tags: (\w+)$", TASKS, re.MULTILINE) == ["driver", "python", "env", "jupyter", "jupyter", "check"]
    assert named.split() == ["`driver`", "`python`", "`env`", "`jupyter`", "`check`"]


def test_each_setting_is_used_and_has_a_default() -> None:
    defaults = (SETUP / "roles/nbguard/defaults/main.yml").read_text(encoding="utf-8")
    registered = {"nbguard_device", "nbguard_driver", "nbguard_sources", "nbguard_packaged"}
    driver = (SETUP / "roles/nbguard/tasks/driver.yml").read_text(encoding="utf-8")

    assert set(re.findall(r"nbguard_\w+", TASKS + driver)) - registered == set(
        re.findall(r"^nbguard_\w+", defaults, re.MULTILINE)
    )


def test_the_file_that_ansible_looks_for_is_the_one_that_enable_writes() -> None:
    assert f"/.ipython/profile_default/startup/{FILE}" in TASKS


def test_nbguard_reads_each_command_of_the_role_and_of_the_image() -> None:
    role = re.findall(r"/bin/nbguard ([^\"{]*)", TASKS)
    image = re.findall(r"&& nbguard (.*?)(?: \\)?$", DOCKERFILE, re.MULTILINE)

    assert len(role) == len(image) == 2
    for line in (*role, *image):
        command_parser().parse_args(shlex.split(line))


def test_the_script_that_plays_it_is_one_that_bash_reads() -> None:
    bash = shutil.which("bash")
    assert bash is not None

    subprocess.run([bash, "-n", str(SETUP / "test")], check=True)
