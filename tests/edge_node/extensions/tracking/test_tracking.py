"""What is told of trackers before anything begins, and what they load."""

import subprocess
import sys

import pytest

from broker_config.protocol.errors import UsageError
from tests.support.plants import here
from trainer.progress import ignore
from trainer.progress.trackers import track


def refused(name: str, place: str) -> UsageError:
    with pytest.raises(UsageError) as caught, track({name: place}, ignore):
        pass
    return caught.value


def test_a_wrong_name_or_place_is_answered_before_anything_begins() -> None:
    assert "'tensorboard'" in refused("tensorbord", "runs").remedy
    assert "URL of an MLflow server" in refused("mlflow", "sqlite:///mlflow.db").what
    assert "MLFLOW_TRACKING_USERNAME" in refused("mlflow", "https://me:secret@mlflow.local").remedy


def test_the_help_names_both() -> None:
    shown = here("simulate", "--help").stdout
    assert "mlflow" in shown
    assert "tensorboard" in shown


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_a_missing_package_is_told_with_the_extra_that_brings_it(name: str) -> None:
    code = (
        f"import sys\nsys.modules[{name!r}] = None\n"
        "from trainer.progress import ignore\nfrom trainer.progress.trackers import track\n"
        "from broker_config.protocol.errors import UsageError\n"
        "try:\n"
        f"    with track({{{name!r}: 'runs'}}, ignore): pass\n"
        "except UsageError as error:\n"
        "    print(error.what, error.remedy, sep='\\n')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    what, remedy = done.stdout.splitlines()
    assert name in what
    assert "pip install 'edge-node[tracking]'" in remedy


def test_no_tracker_loads_torch_which_a_coordinator_may_not_have() -> None:
    code = (
        "import sys\n"
        "import edge_node.extensions.tracking.tensorboard, edge_node.extensions.tracking.mlflow\n"
        "found = [name for name in sys.modules if name.partition('.')[0] in ('torch', "
        "'tensorflow')]\n"
        "sys.exit(str(found) if found else 0)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
