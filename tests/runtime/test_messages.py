from maxlp.runtime.messages import counted


def test_counted_nouns():
    assert [counted(n, "spike") for n in (0, 1, 2000)] == ["0 spikes", "1 spike", "2,000 spikes"]
    assert counted(2, "process", "processes") == "2 processes"
