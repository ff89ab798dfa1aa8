"""Both frameworks side by side: eight JAX devices in this process, torch ranks outside."""

from collections.abc import Iterator
from typing import Any

import pytest

from parity_tests.checks.cells import COVERING, SIMPLE, every_cell, every_simple_cell
from parity_tests.harness import jax_setup
from parity_tests.harness.pool import RankPool
from parity_tests.harness.ulps import ErrorTable

jax_setup.prepare()
TABLE = pytest.StashKey[ErrorTable]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option for the product of all choices."""
    parser.addoption(
        "--full",
        action="store_true",
        help="compare the cores on all combinations of method, mesh, dtype and model",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is marked ``only_full``, unless ``--full`` asks for it."""
    if not config.getoption("full"):
        left_out = [item for item in items if item.get_closest_marker("only_full")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("only_full")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs a test that asks for a ``cell`` or ``simple_cell`` on each cell of the comparison."""
    if "cell" in metafunc.fixturenames and not is_parametrized(metafunc, "cell"):
        chosen = every_cell() if metafunc.config.getoption("full") else COVERING
        metafunc.parametrize("cell", chosen, ids=str)
    if "simple_cell" in metafunc.fixturenames:
        chosen = every_simple_cell() if metafunc.config.getoption("full") else SIMPLE[1::4]
        metafunc.parametrize("simple_cell", chosen, ids=str)


def is_parametrized(metafunc: pytest.Metafunc, name: str) -> bool:
    """True if the test itself says which values ``name`` takes."""
    marks = metafunc.definition.iter_markers("parametrize")
    return any(name in mark.args[0].replace(",", " ").split() for mark in marks)


def pytest_configure(config: pytest.Config) -> None:
    """Starts the session's table of errors; says what the mark of long tests is."""
    config.addinivalue_line("markers", "only_full: runs with --full; others see most of it")
    config.stash[TABLE] = ErrorTable()
    # The cache is not written atomically; an entry that a second session is writing is
    # compiled again, with this warning.
    config.addinivalue_line("filterwarnings", "ignore:Error reading persistent compilation cache")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In a worker of pytest-xdist: sends the table to the process that prints it."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["distances"] = session.config.stash[TABLE].as_lists()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes the table of a worker that has ended; one that crashed has none."""
    node.config.stash[TABLE].merge(getattr(node, "workeroutput", {}).get("distances", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the worst error of every quantity that was compared."""
    lines = terminalreporter.config.stash[TABLE].lines()
    if lines:
        terminalreporter.section("distance between the cores, in ulps of the tensor")
        for line in lines:
            terminalreporter.line(line)


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Torch ranks; started by the first test that runs something on them."""
    ranks = RankPool()
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def is_full(pytestconfig: pytest.Config) -> bool:
    """Whether ``--full`` was given."""
    return bool(pytestconfig.getoption("full"))


@pytest.fixture(scope="session")
def errors(pytestconfig: pytest.Config) -> ErrorTable:
    """Collects comparisons for the table at the end."""
    return pytestconfig.stash[TABLE]
