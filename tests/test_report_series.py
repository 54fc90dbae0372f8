import pytest
from hypothesis import given
from hypothesis import strategies as st

from sortedrl.core.events import Begin
from sortedrl.report.record import RunRecord, SeedGroup, seed_groups, seed_series, spread


def record(name="run", *, seed=0, **changes):
    config = {
        "model": "tiny",
        "task": f"knights_knaves:people=3,seed={seed + 1}",
        "out": f"runs/{name}",
        "seed": seed,
        "schedule": {"strategy": "sorted", "lookahead": 1},
        "evaluation": {"tasks": [f"knights_knaves:people=3,seed={seed},split=test"]},
    }
    begin = Begin(seconds=0.0, schedule="sorted/coupled", slots=4, seed=seed)
    return RunRecord(name=name, events=[begin], config=config | changes)


def without_config(name="run"):
    begin = Begin(seconds=0.0, schedule="sync", slots=4, seed=0)
    return RunRecord(name=name, events=[begin])


def grouped(*records):
    return [group.places for group in seed_groups(records)]


def lines(least_size=1):
    places = st.lists(st.integers(0, 40), min_size=least_size, unique=True).map(sorted)
    value = st.floats(-100, 100)
    return places.flatmap(
        lambda xs: st.lists(value, min_size=len(xs), max_size=len(xs)).map(
            lambda ys: list(zip(xs, ys, strict=True))
        )
    )


@given(st.lists(lines(), min_size=1, max_size=4))
def test_the_mean_lies_in_the_band_and_the_band_where_all_lines_reach(given_lines):
    points, band = spread(given_lines)
    start = max(line[0][0] for line in given_lines)
    end = min(line[-1][0] for line in given_lines)
    wanted = sorted({x for line in given_lines for x, _ in line if start <= x <= end})
    assert [x for x, _ in points] == [x for x, _, _ in band] == wanted
    for (_, mean), (_, least, most) in zip(points, band, strict=True):
        assert least <= mean <= most


@given(st.lists(lines(), min_size=1, max_size=4), st.randoms())
def test_every_point_of_every_line_lies_in_the_band_whatever_their_order(given_lines, random):
    band = {x: (least, most) for x, least, most in spread(given_lines).band}
    for line in given_lines:
        for x, y in line:
            if x in band:
                assert band[x][0] <= y <= band[x][1]
    shuffled = random.sample(given_lines, len(given_lines))
    assert spread(shuffled).band == spread(given_lines).band


@given(lines(), st.integers(1, 3))
def test_the_mean_of_one_line_told_several_times_is_that_line(line, count):
    points, band = spread([line] * count)
    assert [x for x, _ in points] == [x for x, _ in line]
    assert [y for _, y in points] == pytest.approx([y for _, y in line])
    assert band == tuple((x, y, y) for x, y in line)


def test_between_its_points_a_line_is_straight():
    points, band = spread([[(0, 0.0), (10, 1.0)], [(0, 0.5), (5, 1.0), (20, 0.0)]])
    assert points == ((0, 0.25), (5, 0.75), (10, pytest.approx((1 + 2 / 3) / 2)))
    assert band[1] == (5, 0.5, 1.0)


def test_where_a_line_has_two_values_at_a_place_the_last_holds():
    assert spread([[(0, 1.0), (2, 3.0), (2, 5.0)]]).points == ((0, 1.0), (2, 5.0))


def test_lines_that_never_meet_have_no_mean():
    assert spread([]) == ((), ())
    assert spread([[], []]) == ((), ())
    assert spread([[(0, 1.0)], [(1, 1.0)]]) == ((), ())


def test_a_line_without_points_is_left_out_of_the_mean():
    assert spread([[(0, 1.0), (1, 2.0)], []]).points == ((0, 1.0), (1, 2.0))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b0", "b1", "c/seed-1", "c/seed-2"]),
            st.integers(0, 3),
            st.sampled_from([1, 2]),
            st.booleans(),
        )
    )
)
def test_every_run_is_in_one_group_of_other_seeds_and_groups_have_their_own_names(drawn):
    records = [
        record(name, seed=seed, epochs=epochs) if is_known else without_config(name)
        for name, seed, epochs, is_known in drawn
    ]
    groups = seed_groups(records)
    assert sorted(place for group in groups for place in group.places) == list(range(len(records)))
    assert [group.places[0] for group in groups] == sorted(g.places[0] for g in groups)
    names = [group.name for group in groups]
    assert len(set(names)) == len(names)
    for group in groups:
        configs = [records[place].config for place in group.places]
        if len(configs) > 1:
            assert len({config["seed"] for config in configs}) == len(configs)
            assert len({config["epochs"] for config in configs}) == 1


def test_runs_that_differ_only_in_the_seed_are_one_group():
    assert grouped(record(seed=0), record(seed=1), record(seed=2)) == [(0, 1, 2)]


def test_one_seed_told_twice_is_not_two_draws():
    assert grouped(record(), record(), record(seed=1)) == [(0, 2), (1,)]


def test_where_and_how_fast_a_run_goes_makes_no_difference():
    other = record(
        seed=1,
        out="elsewhere",
        threads=8,
        device="cuda",
        saving={"every": 5},
        tracking={"wandb": "mine"},
        rewards={"workers": 3},
    )
    assert grouped(record(), other) == [(0, 1)]


@pytest.mark.parametrize(
    "changes",
    [
        {"epochs": 2},
        {"schedule": {"strategy": "sync", "lookahead": 1}},
        {"task": "knights_knaves:people=4,seed=1"},
        {"task": "knights_knaves:people=3,unseed=1"},
        {"evaluation": {"tasks": []}},
        {"rewards": {"failure_reward": -1.0}},
        {"model": "other"},
    ],
)
def test_everything_else_makes_a_difference(changes):
    assert grouped(record(), record(seed=1, **changes)) == [(0,), (1,)]


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("runs/demo0/warm/model", "runs/demo1/warm/model", True),
        ("h0/seed-0/model", "h0/seed-1/model", True),
        ("runs/demo3/warm/model", "runs/demo4/warm/model", False),
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-1.5B", False),
        ("llama-10", "llama-11", False),
        ("models/0.0", "models/0.1", False),
        ("demo0/model", "demo1/warm/model", False),
    ],
)
def test_models_are_the_same_where_their_folders_are_named_after_the_seeds(one, other, is_same):
    found = grouped(record(model=one), record(seed=1, model=other))
    assert (len(found) == 1) == is_same


def test_a_run_without_settings_is_a_group_of_its_own():
    assert grouped(without_config(), without_config()) == [(0,), (1,)]


def test_a_group_is_called_by_what_its_runs_names_share_or_else_by_its_schedule():
    def names(*given):
        return [g.name for g in seed_groups([record(n, seed=s) for s, n in enumerate(given)])]

    assert names("demo0/sorted", "demo1/sorted") == ["sorted"]
    assert names("sync-seed-1", "sync-seed-2") == ["sync"]
    assert names("runs/a/x", "runs/b/x") == ["runs/x"]
    assert names("seed0", "seed1") == ["sorted/coupled"]
    assert names("left", "right") == ["sorted/coupled"]
    assert names("alone") == ["alone"]


def test_a_run_that_stands_alone_keeps_its_name_before_a_group_gets_it():
    records = [record("s0", seed=0), record("s1", seed=1), without_config("sorted/coupled")]
    assert [g.name for g in seed_groups(records)] == ["sorted/coupled (2)", "sorted/coupled"]


def test_a_group_is_drawn_as_its_mean_with_a_band_and_a_run_as_it_is():
    groups = [SeedGroup(name="both", places=(0, 2)), SeedGroup(name="one", places=(1,))]
    both, one = seed_series(groups, [[(0, 1.0)], [(0, 9.0)], [(0, 2.0)]])
    assert (both.name, both.points, both.band) == ("both", ((0, 1.5),), ((0, 1.0, 2.0),))
    assert both.note == "mean of 2 seeds"
    assert (one.points, one.band, one.note) == (((0, 9.0),), (), "")


def test_a_group_of_which_one_seed_has_begun_says_so():
    (series,) = seed_series([SeedGroup(name="g", places=(0, 1))], [[], [(0, 1.0)]])
    assert (series.points, series.band, series.note) == (((0, 1.0),), (), "1 of 2 seeds")
