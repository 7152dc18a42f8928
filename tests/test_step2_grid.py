"""The order of the ranks in the grid, against a table written out by hand."""

import json

import pytest

#       rank: (dp, pp, tp), dp group, pp group, tp group, of 2 x 2 x 2
TABLE = {0: [[0, 0, 0], [0, 4], [0, 2], [0, 1]],
         1: [[0, 0, 1], [1, 5], [1, 3], [0, 1]],
         2: [[0, 1, 0], [2, 6], [0, 2], [2, 3]],
         3: [[0, 1, 1], [3, 7], [1, 3], [2, 3]],
         4: [[1, 0, 0], [0, 4], [4, 6], [4, 5]],
         5: [[1, 0, 1], [1, 5], [5, 7], [4, 5]],
         6: [[1, 1, 0], [2, 6], [4, 6], [6, 7]],
         7: [[1, 1, 1], [3, 7], [5, 7], [6, 7]]}
NEIGHBOURS = {0: [None, 2], 1: [None, 3], 2: [0, None], 3: [1, None],  # rank: the stages before and after
              4: [None, 6], 5: [None, 7], 6: [4, None], 7: [5, None]}
SCRIPT = """
import json
import torch.distributed as dist
import process_group_manager as pgm
pgm.init_process_group("gloo")
pgm.setup_process_group_manager(*json.loads(sys.argv[1]))
grid = pgm.process_group_manager
groups = {name: dist.get_process_group_ranks(group) for name, group in vars(grid).items() if name.endswith("_group")}
if "dp_group" not in groups:  # step 9: the owners of what is on this stage in both pipelines
    groups["dp_group"] = [dist.get_process_group_ranks(group) for stage in (0, 1)
                          if (group := grid.group_of([(0, stage), (1, stage)]))][0]
place = [grid.dp_rank, grid.pp_rank, grid.tp_rank]
neighbours = [getattr(grid, "pp_prev_rank", None), getattr(grid, "pp_next_rank", None)]
with open(sys.argv[2] + str(grid.global_rank), "w") as file:
    json.dump([place, groups, neighbours, grid.is_logging_rank], file)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("step, sizes", [(2, "[2, 2, 2]"), (8, "[2, 2, 2]"), (9, "[[2, 2], 2]")])
def test_eight_ranks(run_code, tmp_path, step, sizes):
    run_code(step, 8, SCRIPT, sizes, f"{tmp_path}/", timeout=60)
    logging = []
    for rank, (place, *expected) in TABLE.items():
        found_place, groups, neighbours, is_logging_rank = json.loads((tmp_path / str(rank)).read_text())
        assert found_place == place, rank
        assert [groups[f"{axis}_group"] for axis in ("dp", "pp", "tp")] == expected, rank
        for other in {"pp_backward_group", "pp_ends_group"} & groups.keys():
            assert groups[other] == expected[1], (rank, other)
        if step > 2:
            assert neighbours == NEIGHBOURS[rank], rank
        logging += [rank] * is_logging_rank
    assert logging == [2]  # on the last stage
