from hypothesis import given

from microbatch._paths import leaf_paths

from .strategies import Problem, problems


@given(problems())
def test_leaf_paths_evaluate_to_their_leaves(problem: Problem) -> None:
    paths = list(leaf_paths(problem.value, "value"))
    assert len(set(paths)) == len(paths)
    for path, leaf in zip(paths, problem.leaves, strict=True):
        assert eval(path, {"value": problem.value}) is leaf
