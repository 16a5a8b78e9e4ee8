from laboratory import checkpoints, finished, gone_on, shown, smaller

from psgd.experiments import wall_clock


def test_every_method_takes_its_turn():
    (config,) = wall_clock.cells("quick")
    result = finished(wall_clock, config)
    (table,) = wall_clock.tables([result])
    assert [row[0] for row in table.rows] == list(wall_clock.contestants())
    ratios = {row[0]: row[2] for row in table.rows}
    assert ratios["sgd"] == 1 and all(r > 0 for r in ratios.values())
    assert ratios["psgd-lra, p = 1"] > ratios["psgd-lra, p = 0.1"]  # 10 products against 1: no load hides that
    assert "the aim of 1.2" in wall_clock.remarks([result]) and wall_clock.plots([result])
    shown(wall_clock, [])


def test_resuming_takes_the_turns_that_are_left():
    config = smaller(wall_clock.cells("quick")[0], turns=2)
    first, _ = checkpoints(wall_clock, config)
    found = gone_on(wall_clock, config, *first).records
    assert found[0] == first[0][0] and [r["step"] for r in found] == [1, 2]
