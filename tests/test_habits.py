"""Workflows, templates and the Makefile say the same as pyproject.toml, and versions agree."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import rkfac

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PYTHONS = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))


def read(path: Path) -> dict[Any, Any]:
    found = yaml.safe_load(path.read_text())
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_can_be_read_and_its_commands_are_there(path: Path) -> None:
    workflow = read(path)
    assert {"name", "jobs", "permissions"} <= workflow.keys()
    assert True in workflow, "YAML reads `on` as a truth"
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for job in workflow["jobs"].values():
        assert "timeout-minutes" in job
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            for made in re.findall(r"\bmake ([a-z ]+)$", step.get("run", ""), re.MULTILINE):
                assert set(made.split()) <= set(targets), made


def test_tests_run_on_what_the_project_says_it_supports() -> None:
    matrix = read(ROOT / ".github" / "workflows" / "tests.yml")["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == PYTHONS
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    versions = {row["torch"]: row["version"] for row in matrix["include"]}
    (least,) = re.findall(r"torch>=([\d.]+)", " ".join(PROJECT["dependencies"]))
    assert versions == {"oldest": f"torch=={least}.*", "newest": "torch"}
    assert matrix["torch"] == list(versions)


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_a_form_is_one_that_github_shows(path: Path) -> None:
    form = read(path)
    assert {"name", "description", "body"} <= form.keys()
    for field in form["body"]:
        assert field["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes")
        assert field["type"] == "markdown" or field["attributes"]["label"]
    names = [field.get("id") for field in form["body"]]
    assert len(names) == len(set(names))


def test_the_version_is_the_same_everywhere() -> None:
    cited = read(ROOT / "CITATION.cff")["version"]
    assert PROJECT["version"] == rkfac.__version__ == cited


def test_what_decides_about_a_change_runs_every_check() -> None:
    made = re.findall(r"^make ([a-z ]+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    (check,) = re.findall(r"^check: ([a-z ]+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {word for line in made for word in line.split()} == set(check.split())


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_the_demonstration_installs_what_it_needs_and_no_more() -> None:
    def said(target: str) -> str:
        command = ["make", "--dry-run", "--always-make", target]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert '-e ".[lab]"' in said("demo")
    assert not re.search(r"dev|docs|tensorboard|oracles", said("demo"))
    assert '-e ".[lab,tensorboard,docs,dev]"' in said("test")
