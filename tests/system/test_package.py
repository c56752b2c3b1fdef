"""The distributions that are built: their metadata, and what lies in them."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from paths import ROOT


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel and an sdist of this checkout."""
    made = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(made)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return made


@pytest.fixture(scope="module")
def wheel(folder: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(next(folder.glob("*.whl")))


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    name = next(one for one in wheel.namelist() if one.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(wheel.read(name))


def test_the_license_is_an_spdx_expression_with_its_file(wheel: zipfile.ZipFile, metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())
    assert metadata["Author"] == "Heliograph developers"
    assert metadata["Keywords"] and metadata.get_all("Classifier")


def test_the_long_description_has_no_link_that_leads_nowhere(metadata: Message) -> None:
    text = str(metadata.get_payload())
    assert text.startswith("# Heliograph")
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert [one for one in targets if not one.startswith(("https://", "http://", "#"))] == []


def test_the_client_alone_needs_four_packages(metadata: Message) -> None:
    needs = [one for one in metadata.get_all("Requires-Dist", []) if "extra ==" not in one]
    assert sorted(re.split(r"[<>=]", one)[0] for one in needs) == ["blake3", "grpcio", "numpy", "protobuf"]


def test_the_wheel_has_typed_packages_and_generated_code_and_no_tests(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    packages = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert packages == {"heliograph", "heliograph_backends", "heliograph_proto", "heliograph_server"}
    for package in packages:
        assert f"{package}/py.typed" in names
    assert "heliograph_proto/v1/command_pb2.py" in names


def test_the_sdist_has_what_a_reader_and_a_packager_need(folder: Path) -> None:
    with tarfile.open(next(folder.glob("*.tar.gz"))) as sdist:
        names = {name.split("/", 1)[1] for name in sdist.getnames() if "/" in name}
    for needed in ("ARCHITECTURE.md", "CHANGELOG.md", "LICENSE", "README.md", "docs/glossary.md", "Makefile"):
        assert needed in names
    assert any(name.startswith("examples/") for name in names)
    assert "deploy/Dockerfile" in names and "tests/conftest.py" in names
