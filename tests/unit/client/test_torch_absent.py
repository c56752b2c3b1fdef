"""`hg.torch` where PyTorch is not installed."""

from __future__ import annotations

import subprocess
import sys


def test_without_torch_the_error_tells_what_to_install() -> None:
    code = "import sys; sys.modules['torch'] = None\nimport heliograph as hg\n"
    code += "try: hg.torch.export\nexcept hg.ConfigurationError as error: print(error)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "the package 'torch' is not installed" in found.stdout
    assert "pytorch.org" in found.stdout


def test_names_that_the_module_lacks_are_attribute_errors() -> None:
    code = "import heliograph as hg\n"
    code += "try: hg.torch.exprot\nexcept AttributeError as error: print(error)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'heliograph.torch' has no attribute 'exprot'" in found.stdout
