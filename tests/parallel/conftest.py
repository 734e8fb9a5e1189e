import pytest
from processes import Processes


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    pool = Processes(tmp_path_factory.mktemp("processes"))
    yield pool
    pool.close()
