from laboratory import finished, shown

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
