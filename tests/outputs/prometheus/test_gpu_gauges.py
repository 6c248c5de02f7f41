"""GPUs on the metrics page."""

from agent.catalog import gpu_facts as facts
from agent.outputs.prometheus.gpu_gauges import GpuBoard
from agent.records.gpu import GpuSample, MigInstance
from tests.records.making import NOON

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def sample(gpu: str, used_bytes: float, *instances: MigInstance) -> GpuSample:
    told = {(facts.MEMORY_USED.name, ()): used_bytes, (facts.CLOCK.name, ("sm",)): 1.98e9}
    return GpuSample(
        gpu=gpu, index=0, name="NVIDIA H200", at=NOON, facts=told, mig_instances=instances
    )


def series(board: GpuBoard) -> Series:
    return {
        (shown.name, tuple(shown.labels.items())): shown.value
        for family in board.families()
        for shown in family.samples
    }


def test_every_gpu_stands_with_its_newest_reading() -> None:
    board = GpuBoard()
    for gpu, used_bytes in (("GPU-a", 1.0), ("GPU-b", 2.0), ("GPU-a", 3.0)):
        board.sample(sample(gpu, used_bytes))
    told = series(board)
    assert told["gpu_memory_used_bytes", (("gpu", "GPU-a"),)] == 3.0
    assert told["gpu_memory_used_bytes", (("gpu", "GPU-b"),)] == 2.0
    assert told["gpu_clock_hertz", (("gpu", "GPU-a"), ("clock", "sm"))] == 1.98e9


def test_a_mig_instance_stands_with_its_own_uuid() -> None:
    board = GpuBoard()
    instance = MigInstance(
        uuid="MIG-1",
        name="1g.18gb",
        gpu_instance=1,
        compute_instance=0,
        gpu_slices=1,
        facts={(facts.MEMORY_USED.name, ()): 5.0},
    )
    board.sample(sample("GPU-a", 1.0, instance))
    assert series(board)["gpu_memory_used_bytes", (("gpu", "MIG-1"),)] == 5.0


def test_what_no_gpu_tells_is_not_on_the_page() -> None:
    assert series(GpuBoard()) == {}
    board = GpuBoard()
    board.sample(sample("GPU-a", 1.0))
    assert {name for name, _ in series(board)} == {"gpu_memory_used_bytes", "gpu_clock_hertz"}
