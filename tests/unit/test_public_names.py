"""The names that users and their plugins import stay where they are, whichever package has the code."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["tf2dist", "tf2dist.data", "tf2dist.cli", "tf2dist.doctor"])
def test_modules_that_must_start_fast_load_no_tensorflow(module: str) -> None:
    heavy = "{'tensorflow', 'keras', 'h5py'}"
    code = f"import sys, {module}; sys.exit(str({heavy} & set(sys.modules)) if {heavy} & set(sys.modules) else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_package_itself_loads_no_numpy() -> None:
    code = "import sys, tf2dist, tf2dist.data; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_plugin_finds_what_it_needs() -> None:
    from tf2dist import register_data, register_model, register_optimizer
    from tf2dist.data import Arrays, Splits, load

    assert all(map(callable, (register_data, register_model, register_optimizer, Arrays, Splits, load)))
    with pytest.raises(ImportError):
        from tf2dist.data import nothing_of_this_name  # type: ignore[attr-defined]  # noqa: F401
