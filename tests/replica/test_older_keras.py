"""What an older Keras lacks is refused by name where it is needed, and nowhere else."""

import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY, slowness

# As with Keras 3.13, but for what `make versions` runs on Keras 3.12 itself.
CODE = """if True:
    import keras
    del keras.optimizers.MultiOptimizer, keras.optimizers.ScheduleFreeAdamW
    from tests.replica.test_like_keras import step_of
    from tf2dist.errors import InstallationError
    step_of("distiller")
    try:
        step_of("gan")
    except InstallationError as error:
        print(error)
"""


@pytest.mark.thorough
def test_a_step_with_several_updates_needs_keras_with_a_multi_optimizer() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=REPOSITORY, capture_output=True, text=True, timeout=100 * slowness()
    )
    assert done.returncode == 0, done.stderr
    assert "has no MultiOptimizer, which a step with several updates needs; install keras>=3.15" in done.stdout
