import numpy as np
import pytest

from affine_attention.lab import figures
from affine_attention.lab.report import load_run
from affine_attention.lab.report.groups import COLOURS

from .report.folders import make_run

matplotlib = pytest.importorskip("matplotlib", reason="needs matplotlib (the extra `lab`)")
matplotlib.use("Agg")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return [
        make_run(root / f"{name}-{seed}", name, seed, steps=90) for name in ("softmax", "affine") for seed in (0, 1)
    ]


@pytest.fixture
def ax():
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    yield axes
    pyplot.close(figure)


def strong(ax):
    """The lines that the legend names."""
    return {line.get_label(): line for line in ax.get_lines() if not line.get_label().startswith("_")}


def test_the_loss_is_the_mean_of_the_seeds_in_the_colour_of_the_mechanism(runs, ax):
    assert figures.plot_loss(runs, ax) is ax
    lines = strong(ax)
    assert list(lines) == ["softmax", "affine"]
    expected = np.mean([load_run(path).series("loss")[1] for path in runs[2:]], axis=0)
    assert np.allclose(lines["affine"].get_ydata(), expected)
    assert lines["affine"].get_color() == COLOURS["affine"][0]
    assert len(ax.get_lines()) == 6, "two means and four seeds"


def test_the_late_loss_starts_at_seven_ninths(runs, ax):
    figures.plot_loss(runs, ax, since=7 / 9, smoothing=0.5)
    line = strong(ax)["softmax"]
    assert line.get_xdata()[0] == 70
    raw = np.mean([load_run(path).series("loss")[1] for path in runs[:2]], axis=0)[69:]
    assert line.get_ydata()[0] == pytest.approx(raw[0])
    assert line.get_ydata()[1] == pytest.approx((raw[0] * 0.25 + raw[1] * 0.5) / 0.75)


def test_gradient_norms_are_logarithmic_and_end_where_asked(runs, ax):
    figures.plot_gradient_norm(runs, ax, until=50)
    assert ax.get_yscale() == "log"
    assert strong(ax)["affine"].get_xdata()[-1] == 50


def test_logits_of_one_layer(runs, ax):
    figures.plot_mean_logit(runs[0], ax, layer=1)
    _, values = load_run(runs[0]).probes("mean_logit")
    assert np.allclose(strong(ax)["softmax"].get_ydata(), values[:, 1].mean(axis=1))


@pytest.mark.parametrize(("draw", "keys"), [(figures.plot_first_token, ("first_token", "mean")),
                                            (figures.plot_entropy, ("entropy", "softmax"))])  # fmt: skip
def test_layer_by_layer(runs, ax, draw, keys):
    draw(runs[2], ax)
    assert np.allclose(strong(ax)["affine"].get_ydata(), load_run(runs[2]).inspected(*keys).mean(axis=1))
    assert ax.get_ylim()[0] <= 0


def test_row_sums_of_softmax_are_one_bar_at_one(runs, ax):
    figures.plot_row_sums(runs[0], ax)
    stairs = ax.patches[0].get_data()
    assert stairs.values.tolist() == [1.0]
    assert stairs.edges.tolist() == pytest.approx([0.99, 1.01])


def test_total_weights_as_an_image(runs, ax):
    figures.plot_total_weight(runs[2:], ax, normalise=True)
    values = np.mean([load_run(path).inspected("total_weight", "mean") for path in runs[2:]], axis=0)
    shown = ax.images[0].get_array()
    assert np.allclose(shown, (values - values.min()) / (values.max() - values.min()))


def test_a_map_is_signed_with_zero_in_the_middle(runs, ax):
    figures.plot_attention_map(runs[2], ax, layer=1, head=2, tokens=12)
    weights = load_run(runs[2]).maps()[1][2, :12, :12]
    assert np.allclose(ax.images[0].get_array(), weights)
    low, high = ax.images[0].get_clim()
    assert low == -high
    assert [label.get_text() for label in ax.get_yticklabels()][:2] == ["The", " quick"]


def test_alphas_and_activations(runs, ax):
    figures.plot_alpha(runs, ax)
    assert ax.patches[0].get_data().values.sum() == pytest.approx(1, rel=1e-3)
    ax.clear()
    figures.plot_activations(ax)
    x, y = strong(ax)["linear clipping"].get_data()
    assert np.allclose(y, np.clip(0.1 * x + 0.5, 0, 1))


def test_an_axis_is_made_when_none_is_given(runs):
    from matplotlib import pyplot

    ax = figures.plot_loss(runs[0])
    assert ax.get_xlabel() == "step"
    pyplot.close(ax.figure)


def test_hostile_names_are_drawn_as_they_are(tmp_path, ax):
    from affine_attention.nn import Mechanism

    run = make_run(tmp_path / "a", Mechanism("_$\\frac{$"), steps=12, tokens=["$x^$", "\0", "_", "ß"], map_length=4)
    figures.plot_loss(run, ax)
    ax.figure.canvas.draw()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [" _\\$\\frac{\\$"]
    ax.clear()
    figures.plot_attention_map(run, ax)
    ax.figure.canvas.draw()


def test_errors_name_the_run_and_the_way_out(tmp_path, runs, ax):
    bare = make_run(tmp_path / "bare", "affine", steps=12, inspected=False)
    for draw in (
        figures.plot_row_sums,
        figures.plot_first_token,
        figures.plot_total_weight,
        figures.plot_attention_map,
    ):
        with pytest.raises(ValueError, match=r"bare.*affine inspect"):
            draw(bare, ax)
    with pytest.raises(ValueError, match=r"layer must be one of those kept, 0, 1, 2, 3, got 9"):
        figures.plot_attention_map(runs[0], ax, layer=9)
    with pytest.raises(ValueError, match="head must be from 0 to 5, got 6"):
        figures.plot_attention_map(runs[0], ax, head=6)
    with pytest.raises(ValueError, match="softmax, affine"):
        figures.plot_total_weight(runs, ax)
    with pytest.raises(ValueError, match="smoothing"):
        figures.plot_loss(runs, ax, smoothing=1.0)
    with pytest.raises(ValueError, match="of must be"):
        figures.plot_entropy(runs, ax, of="p")
    with pytest.raises(ValueError, match="at least one"):
        figures.plot_loss([], ax)
