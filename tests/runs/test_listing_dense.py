import json

import pytest

from linvit.cli import main
from linvit.runs.listing_dense import PUBLISHED


@pytest.mark.slow
def test_the_command_prints_rows_of_every_framework(capsys):
    assert main(["models", "--dense", "--family", "mavit", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 40
    assert {"framework", "backbone", "parameters", "macs", "macs_attention"} <= rows[0].keys()
    assert {row["framework"] for row in rows} == set(PUBLISHED)


def test_another_family_is_refused(capsys):
    assert main(["models", "--dense", "--family", "care"]) == 2
    assert "ravlt, mavit" in capsys.readouterr().err
