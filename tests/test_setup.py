"""The role of setup/ and what is said of it. setup/test plays all of it on a bare Debian; this reads it."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from nbguard.frontend.cli import TERMINAL
from nbguard.frontend.notebook.startup import FILE

ROOT = Path(__file__).parents[1]
SETUP = ROOT / "setup"
TASKS = (SETUP / "roles/nbguard/tasks/main.yml").read_text(encoding="utf-8")
SERVICE = (SETUP / "roles/nbguard/templates/jupyter.service").read_text(encoding="utf-8")
README = (SETUP / "README.md").read_text(encoding="utf-8")
DOCKERFILE = (SETUP / "Dockerfile").read_text(encoding="utf-8")


def test_the_tags_are_those_that_the_readme_names() -> None:
    (named,) = re.findall(r"^Tags: ([^.]*)\.", README, re.MULTILINE)

    assert re.findall(r"^  tags: (\w+)$", TASKS, re.MULTILINE) == [
        *("driver", "python"),
        *["env"] * 4,
        *["jupyter"] * 5,
        "check",
    ]
    assert named.split() == ["`driver`", "`python`", "`env`", "`jupyter`", "`check`"]


def test_each_setting_is_used_and_has_a_default() -> None:
    defaults = (SETUP / "roles/nbguard/defaults/main.yml").read_text(encoding="utf-8")
    registered = {"nbguard_device", "nbguard_driver", "nbguard_sources", "nbguard_packaged", "nbguard_versions"}
    driver = (SETUP / "roles/nbguard/tasks/driver.yml").read_text(encoding="utf-8")

    assert set(re.findall(r"nbguard_\w+", TASKS + driver + SERVICE)) - registered == set(
        re.findall(r"^nbguard_\w+", defaults, re.MULTILINE)
    )


def test_the_file_that_ansible_looks_for_is_the_one_that_enable_writes() -> None:
    assert f"/.ipython/profile_default/startup/{FILE}" in TASKS


def test_nbguard_reads_each_command_of_the_role_and_of_the_image() -> None:
    role = re.findall(r"/bin/nbguard ([^\"{]*)", TASKS)
    image = re.findall(r"&& nbguard (.*?)(?: \\)?$", DOCKERFILE, re.MULTILINE)

    written = re.findall(r"`nbguard (lock [^`]*)`", README)

    assert (len(role), len(image), len(written)) == (3, 3, 2)
    for line in (*role, *image, *written):
        TERMINAL.read(shlex.split(line.partition(">")[0]))


def test_the_service_runs_what_the_environment_has_and_the_readme_reaches_it() -> None:
    pytest.importorskip("jupyterlab", reason="the environment of `make unit` alone has no JupyterLab")
    defaults = yaml.safe_load((SETUP / "roles/nbguard/defaults/main.yml").read_text(encoding="utf-8"))
    assert isinstance(defaults, dict)
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(re.sub(r"\{\{ (\w+) \}\}", lambda name: str(defaults[name[1]]), SERVICE))

    program, *arguments = shlex.split(unit["Service"]["ExecStart"])
    assert program == f"{defaults['nbguard_env']}/bin/jupyter"
    assert f". {defaults['nbguard_env']}/bin/activate" in README
    assert f"{defaults['nbguard_env']}/share/jupyter.service" in README
    assert f"-L {defaults['nbguard_port']}:localhost:{defaults['nbguard_port']}" in README
    shown = subprocess.run([sys.executable, "-m", "jupyter", *arguments, "--show-config-json"], capture_output=True, check=True)
    server = json.loads(shown.stdout)["ServerApp"]
    assert (server["ip"], server["port"], server["port_retries"]) == ("127.0.0.1", defaults["nbguard_port"], 0)


def test_the_example_of_an_inventory_sets_what_the_role_knows() -> None:
    defaults = yaml.safe_load((SETUP / "roles/nbguard/defaults/main.yml").read_text(encoding="utf-8"))
    every = yaml.safe_load((SETUP / "inventory.yml").read_text(encoding="utf-8"))["all"]

    given = {*every["vars"], *(name for settings in every["hosts"].values() for name in settings or ())}
    assert {name for name in given if not name.startswith("ansible_")} <= set(defaults)
    assert all(host in README for host in list(every["hosts"])[:1])


def test_the_image_begins_with_a_dated_one() -> None:
    (base,) = re.findall(r"^ARG BASE=(\S+)$", DOCKERFILE, re.MULTILINE)

    assert re.search(r":cuda\d\d-20\d\d-\d\d-\d\d$|@sha256:[0-9a-f]{64}$", base)
    assert base in README


def test_the_script_that_plays_it_is_one_that_bash_reads() -> None:
    bash = shutil.which("bash")
    assert bash is not None

    subprocess.run([bash, "-n", str(SETUP / "test")], check=True)


def test_each_action_of_the_workflows_is_pinned_to_a_commit() -> None:
    used = [
        line.partition("uses:")[2].strip()
        for file in (ROOT / ".github").rglob("*.yml")
        for line in file.read_text(encoding="utf-8").splitlines()
        if "uses:" in line
    ]

    assert used
    assert [use for use in used if not re.fullmatch(r"(\./\S+|[\w/.-]+@[0-9a-f]{40} # v\d+(\.\d+)*)", use)] == []


def test_a_release_is_uploaded_by_trusted_publishing_after_all_checks() -> None:
    release = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))
    (publish,) = [name for name, job in release["jobs"].items() if "pypi-publish" in str(job)]

    assert release["permissions"] == {"contents": "read"}
    assert release["jobs"][publish]["permissions"] == {"id-token": "write"}
    assert release["jobs"][publish]["needs"] == "check"
    assert release["jobs"]["check"]["needs"] == "build"
    assert "secrets." not in str(release)


def test_each_python_of_the_classifiers_is_checked_before_a_release() -> None:
    release = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))

    assert release["jobs"]["check"]["strategy"]["matrix"]["python"] == named


def test_the_recipe_of_conda_asks_for_what_the_package_asks_for() -> None:
    """The wheel of a `noarch` recipe is the pure one: a compiler on the machine that builds it changes nothing."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    recipe = (SETUP / "conda-forge/meta.yaml").read_text(encoding="utf-8")
    requirements = yaml.safe_load(re.sub(r"{%.*?%}|{{.*?}}", "", recipe))

    (built_with,) = re.findall(r"^requires = \[(.*?)\]", project, re.MULTILINE)
    (runs_with,) = re.findall(r"^dependencies = \[(.*?)^\]$", project, re.MULTILINE | re.DOTALL)
    (python,) = re.findall(r'^requires-python = "(.*)"$', project, re.MULTILINE)
    assert set(requirements["requirements"]["host"]) == {f"python {python}", "pip", *_spaced(built_with)}
    assert set(requirements["requirements"]["run"]) == {f"python {python}", *_spaced(runs_with)}
    assert requirements["build"]["noarch"] == "python"
    assert requirements["build"]["script_env"] == ["NBGUARD_PURE=1"]
    assert f'description = "{requirements["about"]["summary"]}"' in project


def _spaced(requirements: str) -> list[str]:
    """Return requirements of pyproject.toml as conda writes them: `psutil >=5.9`, without markers."""
    return [f"{name} {version}" for name, version in re.findall(r'"([\w-]+)(>=[\d.]+)[^"]*"', requirements)]
