"""Plugins as files, written by the tests of the registry."""

from __future__ import annotations

from pathlib import Path

#: A backend called NAME whose devices are scripted ones, of a kind that each specification may name.
GOOD = '''
"""A plugin."""

from heliograph_backends.contract import CONTRACT_VERSION, Backend, Parameter, ParameterKind
from heliograph_backends.fake import FakeDevice
from heliograph_proto.devices import DeviceType


class NAMEDevice(FakeDevice):
    backend = "NAME"


class NAMEBackend(Backend):
    name = "NAME"
    contract_version = CONTRACT_VERSION
    parameters = (
        Parameter("memory", ParameterKind.SIZE, "bytes"),
        Parameter("rows", ParameterKind.COUNT, "how many"),
        Parameter("label", ParameterKind.TEXT, "for people"),
        Parameter("kind", ParameterKind.TEXT, "the type of device"),
    )

    def __init__(self, parameters=({},)):
        self.made = []
        for number, one in enumerate(parameters):
            device = NAMEDevice(f"NAME{number}", one.get("memory", 2**20))
            device.description = one.get("label", "")
            device.type = DeviceType[one.get("kind", "ACCELERATOR").upper()]
            device.id = f"0000:c{number}:00.0"
            self.made.append(device)

    def devices(self):
        return self.made

    def features(self):
        return {"simd": "wide"}


BACKEND = NAMEBackend
'''

#: Plugins that are of no use, and what is said of them.
BAD = {
    "raises": ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
    "exits": ("import sys\nsys.exit(3)", "SystemExit: 3"),
    "imports": ("import a_package_that_nobody_has", "No module named 'a_package_that_nobody_has'"),
    "syntax": ("def broken(:", "SyntaxError"),
    "empty": ("", "it defines no BACKEND"),
    "number": ("BACKEND = 3", "3 is not a subclass of"),
    "stranger": ("class Stranger: pass\nBACKEND = Stranger", "is not a subclass of"),
    "older": (GOOD.replace("= CONTRACT_VERSION", "= 1"), "made for version 1 of the contract"),
    "unversioned": (GOOD.replace("contract_version = CONTRACT_VERSION", ""), "for version None"),
    "nameless": (GOOD.replace('name = "NAME"', ""), "name is None"),
    "spaced": (GOOD.replace('name = "NAME"', 'name = "a name"'), "name is 'a name'"),
    "keyed": (GOOD.replace("parameters = (", "parameters = (3,"), "not a sequence of Parameter"),
    "odd": (GOOD.replace("    parameters = (", "    parameters = 3\n    others = ("), "is not iterable"),
    "talkative": ("raise RuntimeError('much\\nto\\nsay ' * 10_000)", "RuntimeError: much to say much"),
    "constructor": (GOOD.replace("self.made = []", "raise OSError('no card')"), "failed: OSError: no card"),
    "abstract": (GOOD.replace("def devices", "def other"), "abstract method"),
    "twin": (GOOD.replace('name = "NAME"', 'name = "cpu"'), "the name 'cpu' is taken: built in"),
}  # fmt: skip

#: Those that show it only when their devices are wanted.
#: A plugin keeps the devices that it does not give.
CLOSED = "[one.close() for one in self.made]; "
BAD_DEVICES = {
    "taken": (GOOD.replace('f"NAME{number}"', '"cpu0"'), "another device is named 'cpu0'"),
    "no_device": (GOOD.replace("return self.made", CLOSED + "return [3]"), "3 among its devices is not"),
    "unnamed": (GOOD.replace('f"NAME{number}"', '""'), "a device has the invalid name ''"),
    "untyped": (GOOD.replace("return self.made", CLOSED + "return 3"), "TypeError"),
    "silent": (GOOD.replace("return self.made", CLOSED + "return []"), "gives no reason"),
}


def write_plugin(folder: Path, name: str, text: str = GOOD) -> Path:
    """A plugin's file that its owner alone can write to."""
    path = folder / f"{name}.py"
    path.write_text(text.replace("NAME", name))
    path.chmod(0o644)
    return path
