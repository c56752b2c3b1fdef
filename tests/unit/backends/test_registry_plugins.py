"""Backends from outside: entry points, modules, files and directories, and what is wrong with them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from plugin_files import BAD, BAD_DEVICES, GOOD, write_plugin

from heliograph_backends.contract import CONTRACT_VERSION
from heliograph_backends.registry import Registry, open_registry
from heliograph_proto.devices import BackendInfo
from heliograph_proto.errors import ConfigurationError


def known(registry: Registry) -> dict[str, BackendInfo]:
    return {one.name: one for one in registry.backends}


def plugin_modules() -> set[str]:
    return {name for name in sys.modules if name.startswith("heliograph_plugin_")}


# Where they come from


def test_a_file_is_loaded_and_its_devices_have_their_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_plugin(tmp_path, "sim")
    registry = open_registry(["sim:memory=3MiB,label=a=b:c/d#e", "cpu:threads=1", "Sim:rows=2"], ["sim.py"])
    first, second, cpu = registry.devices
    assert [one.name for one in registry.devices] == ["sim0", "sim1", "cpu0"]
    assert (first.memory().total_bytes, first.description, first.id) == (
        3 * 2**20,
        "a=b:c/d#e",
        "0000:c0:00.0",
    )
    assert second.memory().total_bytes == 2**20 and cpu.id == ""
    found = known(registry)["sim"]
    assert (found.origin, found.devices, found.why) == (str(path), ("sim0", "sim1"), "")
    assert found.contract_version == CONTRACT_VERSION and found.features == {"simd": "wide"}
    registry.close()


def test_a_module_is_loaded_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "plugin_package").mkdir()
    (tmp_path / "plugin_package" / "__init__.py").touch()
    write_plugin(tmp_path / "plugin_package", "sim")
    registry = open_registry(["sim"], ["plugin_package.sim"])
    assert known(registry)["sim"].origin == "module plugin_package.sim"
    assert "plugin_package.sim" in sys.modules
    registry.unload("sim")
    assert "plugin_package.sim" not in sys.modules
    sys.modules.pop("plugin_package")


def test_every_plugin_directly_inside_a_directory_is_loaded_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "backends"
    (folder / "deeper").mkdir(parents=True)
    for name in ("beta", "alpha", "_helper", ".hidden"):
        write_plugin(folder, name)
    write_plugin(folder, "broken", BAD["raises"][0])
    write_plugin(folder / "deeper", "gamma")
    (folder / "notes.txt").write_text("no plugin")
    registry = Registry()
    found = registry.load(f"{folder}/")
    assert [one.name for one in found] == ["alpha", "beta", "broken"]
    assert [one.name for one in registry.backends if one.origin.startswith(str(folder))] == [
        "alpha",
        "beta",
        "broken",
    ]
    assert known(registry)["broken"].why and not known(registry)["alpha"].why


def test_an_empty_directory_is_said_to_be_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert Registry().load(f"{tmp_path}/") == ()
    assert "there is no plugin in" in caplog.text


def install(folder: Path, name: str, value: str) -> None:
    """What an installer leaves of a package with an entry point."""
    info = folder / "sim_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sim-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[heliograph.backends]\n{name} = {value}\n")


def test_an_installed_backend_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    write_plugin(tmp_path, "siminstalled")
    install(tmp_path, "siminstalled", "siminstalled:BACKEND")
    registry = open_registry(["cpu:threads=1"])
    assert "siminstalled" not in sys.modules
    assert known(registry)["siminstalled"].origin == "entry point of sim-package"
    assert [one.name for one in registry.start(["siminstalled"])] == ["siminstalled0"]
    registry.unload("siminstalled")
    assert "siminstalled" not in sys.modules
    registry.close()


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("other", "simwrong:BACKEND", "its class is named 'simwrong'"),
        ("simwrong", "simwrong:MISSING", "MISSING"),
        ("simwrong", "no_such_package_at_all:BACKEND", "No module named 'no_such_package_at_all'"),
        ("cpu", "simwrong:BACKEND", "the name 'cpu' is taken: built in"),
    ],
)
def test_an_installed_backend_of_no_use_is_known_with_its_reason(
    name: str, value: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    write_plugin(tmp_path, "simwrong")
    install(tmp_path, name, value)
    registry = open_registry(["fake"])
    (found,) = (one for one in registry.backends if "sim-package" in one.origin)
    assert why in found.why and found in registry.unavailable
    registry.close()


def test_a_plugin_that_was_named_comes_before_one_that_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "sim", "sim:BACKEND")
    path = write_plugin(tmp_path, "sim")
    registry = open_registry(["sim"], [str(path)])
    usable, other = (one for one in registry.backends if one.name == "sim")
    assert usable.origin == str(path) and usable.devices == ("sim0",)
    assert other.why == f"the name 'sim' is taken: {path}"
    registry.unload("sim")
    assert registry.start(["sim"])[0].name == "sim0"
    assert known(registry)["sim"].origin == "entry point of sim-package"
    registry.unload("sim")
    assert "sim" not in known(registry) and "sim" not in sys.modules


# What is wrong with them


@pytest.mark.parametrize("name", BAD)
def test_a_plugin_of_no_use_is_known_with_its_reason(name: str, tmp_path: Path) -> None:
    text, why = BAD[name]
    path = write_plugin(tmp_path, name, text)
    modules = plugin_modules()
    registry = open_registry(["fake"], [str(path)])
    (found,) = (one for one in registry.backends if one.origin == str(path))
    assert why in found.why and found.devices == () and "\n" not in found.why
    assert len(found.why) <= 1000
    assert [one.name for one in registry.devices] == ["fake0"]
    registry.close()
    # One whose constructor fails may work another time.
    assert plugin_modules() == modules or name in ("constructor", "abstract")


@pytest.mark.parametrize("name", [name for name in BAD if name not in ("twin", "spaced", "nameless")])
def test_asking_for_a_device_of_a_plugin_of_no_use_is_an_error_that_says_why(
    name: str, tmp_path: Path
) -> None:
    text, why = BAD[name]
    path = write_plugin(tmp_path, name, text)
    with pytest.raises(ConfigurationError) as caught:
        open_registry(["fake", name], [str(path)])
    assert why in caught.value.message and name in caught.value.message


@pytest.mark.parametrize("name", ["raises", "empty", "older", "nameless"])
def test_an_unknown_backend_may_be_a_plugin_that_was_not_loaded(name: str, tmp_path: Path) -> None:
    text, why = BAD[name]
    path = write_plugin(tmp_path, name, text)
    good = write_plugin(tmp_path, "simulator")
    with pytest.raises(ConfigurationError) as caught:
        open_registry(["board"], [str(path), str(good)])
    expected = f"unknown backend 'board'; plugin {path} was not loaded: "
    assert caught.value.message.startswith(expected) and why in caught.value.message
    assert "simulator" not in caught.value.message and "simulator" in caught.value.advice
    assert name not in caught.value.advice


@pytest.mark.parametrize("name", BAD_DEVICES)
def test_devices_of_no_use_are_refused_and_closed(name: str, tmp_path: Path) -> None:
    text, why = BAD_DEVICES[name]
    path = write_plugin(tmp_path, name, text)
    with pytest.raises(ConfigurationError) as caught:
        open_registry(["cpu:threads=2", name], [str(path)])
    assert why in caught.value.message


def test_a_backend_that_cannot_start_gives_its_reason_and_may_be_tried_again() -> None:
    registry = Registry()
    with pytest.raises(ConfigurationError, match="cannot start: the lid is open"):
        registry.start(["fake", "fake:fail=the lid is open"])
    assert known(registry)["fake"].why == "the lid is open" and registry.devices == ()
    (device,) = registry.start(["fake"])
    assert device.name == "fake0" and known(registry)["fake"].why == ""
    registry.close()


def test_an_unknown_backend_is_refused_with_the_nearest_of_all_that_are_known(tmp_path: Path) -> None:
    path = str(write_plugin(tmp_path, "simulator"))
    with pytest.raises(ConfigurationError, match="did you mean 'simulator'"):
        open_registry(["cpu", "simulater:rows=1"], [path])
    with pytest.raises(ConfigurationError, match="did you mean 'label'"):
        open_registry(["simulator:labels=x"], [path])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("./none.py", "there is no plugin at"),
        ("none.py", "there is no plugin at"),
        ("./none/", "there is no plugin at"),
        ("./notes.txt", "there is no plugin at"),
        ("no module", "neither a module nor a file"),
        ("", "neither a module nor a file"),
    ],
)
def test_a_source_that_names_nothing_is_refused(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text(GOOD)
    with pytest.raises(ConfigurationError, match=message):
        open_registry(backends=[source])


def test_a_directory_needs_no_slash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("my_plugins", "my-plugins"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "simulator.py").write_text(GOOD.replace("NAME", "simulator"))
        (found,) = Registry().load(name)
        assert (found.name, found.origin, found.why) == (
            "simulator", str(tmp_path / name / "simulator.py"), ""
        )  # fmt: skip


def test_a_module_goes_before_a_directory_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json").mkdir()
    (found,) = Registry().load("json")
    assert "it defines no BACKEND" in found.why


# Loading and unloading


def test_loading_a_file_twice_is_once_and_a_mended_one_takes_the_place_of_the_broken_one(
    tmp_path: Path,
) -> None:
    path = write_plugin(tmp_path, "sim", BAD["raises"][0])
    registry = Registry()
    assert registry.load(str(path))[0].why
    write_plugin(tmp_path, "sim")
    assert not registry.load(str(path))[0].why
    assert registry.load(str(path)) == registry.load(str(path))
    assert [one.name for one in registry.backends].count("sim") == 1


def test_a_backend_that_was_unloaded_can_be_loaded_anew_with_its_new_code(tmp_path: Path) -> None:
    path, before = write_plugin(tmp_path, "sim"), plugin_modules()
    registry = open_registry(["cpu:threads=1"], [str(path)])
    assert registry.start(["sim"])[0].id == "0000:c0:00.0"
    assert len(plugin_modules() - before) == 1
    registry.unload("sim")
    assert plugin_modules() == before and "sim" not in known(registry)
    write_plugin(tmp_path, "sim", GOOD.replace("0000:c", "0001:c"))
    registry.load(str(path))
    assert registry.start(["sim"])[0].id == "0001:c0:00.0"
    registry.close()


def test_a_backend_in_use_stays_until_it_is_released(tmp_path: Path) -> None:
    registry = open_registry(["sim", "cpu:threads=1"], [str(write_plugin(tmp_path, "sim"))])
    one, two = registry.acquire(), registry.acquire()
    with pytest.raises(ConfigurationError, match="'sim' is in use by 2 sessions"):
        registry.unload("sim")
    registry.release(one)
    with pytest.raises(ConfigurationError, match="'cpu' is in use by 1 session"):
        registry.unload("cpu")
    registry.release(two)
    registry.unload("sim")
    assert [device.name for device in registry.devices] == ["cpu0"]
    registry.close()


def test_what_comes_after_a_session_began_is_not_held_by_it(tmp_path: Path) -> None:
    registry = open_registry(["cpu:threads=1"])
    held = registry.acquire()
    registry.load(str(write_plugin(tmp_path, "sim")))
    registry.start(["sim"])
    registry.unload("sim")
    registry.release(held)
    registry.unload("cpu")


def test_all_devices_of_a_backend_are_made_at_once() -> None:
    registry = open_registry(["fake"])
    with pytest.raises(ConfigurationError, match="is already started"):
        registry.start(["fake:memory=1MiB"])
    registry.close()


def test_an_unknown_backend_cannot_be_unloaded() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'fake'"):
        Registry().unload("fakes")


# Who can write to them


def refused(source: Path) -> ConfigurationError:
    with pytest.raises(ConfigurationError, match="cannot be used for backends") as caught:
        open_registry(["fake"], [str(source)])
    return caught.value


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_a_file_that_others_can_write_to_is_refused_with_what_to_do(mode: int, tmp_path: Path) -> None:
    path = write_plugin(tmp_path, "sim", "raise AssertionError('its code was run')")
    path.chmod(mode)
    error = refused(path)
    assert error.advice == f"chmod go-w {path}"
    assert "others can write to it" in error.message and "was run" not in error.message


def test_a_directory_that_others_can_write_to_is_refused_with_all_that_is_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "backends"
    folder.mkdir()
    path = write_plugin(folder, "sim")
    folder.chmod(0o1777)
    assert refused(folder).advice == f"chmod go-w {folder}"
    folder.chmod(0o775)
    assert refused(path).advice == refused(folder).advice == f"chmod go-w {folder}"


def test_a_folder_above_that_others_can_write_to_is_refused_unless_it_is_sticky(tmp_path: Path) -> None:
    folder = tmp_path / "open" / "backends"
    folder.mkdir(parents=True)
    write_plugin(folder, "sim")
    folder.parent.chmod(0o777)
    assert refused(folder).advice == f"chmod go-w {folder.parent}"
    folder.parent.chmod(0o1777)
    open_registry(["sim"], [f"{folder}/"]).close()


def test_a_link_is_as_good_as_what_it_leads_to_and_where_it_lies(tmp_path: Path) -> None:
    safe, open_to_all = tmp_path / "safe", tmp_path / "open"
    safe.mkdir()
    open_to_all.mkdir()
    good, bad = write_plugin(safe, "sim"), write_plugin(open_to_all, "sim")
    (safe / "link.py").symlink_to(bad)
    (open_to_all / "link.py").symlink_to(good)
    open_to_all.chmod(0o777)
    for link in (safe / "link.py", open_to_all / "link.py"):
        assert refused(link).advice == f"chmod go-w {open_to_all}"
    open_to_all.chmod(0o755)
    open_registry(["sim"], [str(safe / "link.py")]).close()


def test_one_such_file_in_a_directory_is_known_with_its_reason_beside_the_others(tmp_path: Path) -> None:
    write_plugin(tmp_path, "bad").chmod(0o666)
    write_plugin(tmp_path, "good")
    bad, good = Registry().load(f"{tmp_path}/")
    assert f"chmod go-w {bad.origin}" in bad.why and good.why == ""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = write_plugin(tmp_path, "sim")
    os.chown(path, 12345, 0)
    assert refused(path).advice == f"chown 0 {path}"


def test_no_bytecode_is_left_beside_a_plugin(tmp_path: Path) -> None:
    open_registry(["sim"], [str(write_plugin(tmp_path, "sim"))]).close()
    assert [one.name for one in tmp_path.iterdir()] == ["sim.py"]
