"""Private clusters, started once a session; tests are skipped where they cannot start."""

import pytest

from tests.cluster.netns import NamespaceCluster
from tests.cluster.processes import MissingError
from tests.cluster.slurm import SlurmCluster


@pytest.fixture(scope="session")
def slurm():
    """Six nodes n1 ... n6 under a Slurm of their own."""
    try:
        cluster = SlurmCluster(nodes=6, cpus=4)
    except MissingError as reason:
        pytest.skip(f"no Slurm here: {reason}")
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def hosts():
    """Two hosts n1 and n2 in network namespaces."""
    try:
        cluster = NamespaceCluster(2)
    except MissingError as reason:
        pytest.skip(f"no namespaces here: {reason}")
    yield cluster
    cluster.stop()
