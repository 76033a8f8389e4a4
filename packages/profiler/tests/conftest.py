import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Many small operations only wait for a second thread, above all where others want the cores too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
