import pytest

from rpc_pipe.dependency import Action, B, F


def test_prints_and_parses_as_the_field_does():
    assert str(F(2, 0)) == "2F0"
    assert Action.parse("12B345") == B(12, 345)


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "2f0", "-1F0", "2F0 "])
def test_refuses_what_is_no_action(text):
    with pytest.raises(ValueError, match="not an action"):
        Action.parse(text)
