"""Every call of `helpers` in the tests is checked against its shape annotations."""

import pytest
import torch
from hypothesis import settings
from jaxtyping import config, install_import_hook

install_import_hook(
    [
        f"helpers.{name}"
        for name in ("heads", "masks", "attention", "prefix", "t5", "t5_attention", "peft_prefix", "training")
    ],
    "beartype.beartype",
)
settings.register_profile("patient", settings(), deadline=None)  # a busy machine is no fault of the code
settings.load_profile("patient")
torch.set_num_threads(1)  # the tensors of the tests are too small to share


@pytest.fixture
def unchecked():
    """Annotations unchecked, as for a reader: what is raised is raised by the function itself."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
