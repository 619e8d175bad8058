"""The values that tests/support/behaviour.json records have not changed."""

import json

import pytest

from support import behaviour
from support.behaviour import SETTINGS, Setting

RECORD = json.loads(behaviour.RECORD.read_text(encoding="utf-8"))


def test_every_setting_is_recorded_once():
    assert [setting.name for setting in SETTINGS] == list(RECORD)
    assert len(RECORD) == len(SETTINGS)


@pytest.mark.parametrize("setting", SETTINGS, ids=[setting.name for setting in SETTINGS])
def test_prescriptions_costs_and_logits_are_as_recorded(setting: Setting, request: pytest.FixtureRequest):
    if setting.model == "vit-tiny":
        request.getfixturevalue("real_data")
    found = json.loads(json.dumps(behaviour.measured(setting)))
    assert not list(behaviour.differences(RECORD[setting.name], found))


def test_a_changed_value_is_found():
    old = {"ranks": [[2, 3]], "kl": 0.5, "tokens": None}
    assert not list(behaviour.differences(old, {"ranks": [[2, 3]], "kl": 0.5 + 1e-9, "tokens": None}))
    for new in ({**old, "ranks": [[2, 4]]}, {**old, "kl": 0.501}, {**old, "tokens": "tome"}, {"ranks": [[2, 3]]}):
        assert list(behaviour.differences(old, new))
