//! Pictures of several panels as SVG: densities over a logarithmic axis, and isolines over a grid.

use std::fmt::Write as _;

const WIDTH: f64 = 460.0;
const HEIGHT: f64 = 300.0;
/// Margins of a panel: left, right, top, bottom.
const MARGINS: (f64, f64, f64, f64) = (60.0, 20.0, 34.0, 44.0);
const PANELS_ABREAST: usize = 2;
/// A smaller share of a density does not widen its axis.
const RARE: f64 = 5e-4;
/// Labels of isolines are so far apart.
const LABELS_APART: f64 = 24.0;
const COLORS: [&str; 6] = ["#0063b0", "#d1495b", "#3c8d2f", "#b07d00", "#7a4fa3", "#555555"];
/// Height of the title, and of the legend below it.
const HEAD: f64 = 52.0;

/// A curve of points, x before y.
pub(crate) struct Curve {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
}

/// Values at the crossings of a grid.
pub(crate) struct Grid {
    pub(crate) xs: Vec<f64>,
    pub(crate) ys: Vec<f64>,
    /// `values[y][x]`.
    pub(crate) values: Vec<Vec<f64>>,
}

/// A panel of a picture. All axes are logarithmic but the one of a density.
pub(crate) enum Panel {
    /// Curves of a density over a positive quantity.
    Densities { title: String, x_name: &'static str, curves: Vec<Curve> },
    /// Lines of equal value at multiples of `step`, with the values at the crossings.
    Isolines { title: String, x_name: &'static str, y_name: &'static str, grid: Grid, step: f64 },
}

/// Where a panel draws.
struct Frame {
    left: f64,
    top: f64,
    x: (f64, f64),
    y: (f64, f64),
}

impl Frame {
    fn at(&self, x: f64, y: f64) -> (f64, f64) {
        let (left, right, top, bottom) = MARGINS;
        let part = |value: f64, (low, high): (f64, f64)| (value - low) / (high - low).max(1e-12);
        (
            self.left + left + part(x, self.x) * (WIDTH - left - right),
            self.top + HEIGHT - bottom - part(y, self.y) * (HEIGHT - top - bottom),
        )
    }
}

/// The picture of all panels. Curves of one name have one color in all of them.
pub(crate) fn svg(title: &str, panels: &[Panel]) -> String {
    let rows = panels.len().div_ceil(PANELS_ABREAST);
    let (width, height) = (WIDTH * PANELS_ABREAST as f64, HEAD + HEIGHT * rows as f64);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"20\" y=\"20\" font-size=\"14\">{title}</text>\n"
    );
    let mut names: Vec<&str> = Vec::new();
    for panel in panels {
        if let Panel::Densities { curves, .. } = panel {
            for curve in curves {
                if !names.contains(&curve.name.as_str()) {
                    names.push(&curve.name);
                }
            }
        }
    }
    let mut at = 20.0;
    for (name, color) in names.iter().zip(COLORS) {
        let _ = writeln!(
            svg,
            "<rect x=\"{at:.1}\" y=\"34\" width=\"14\" height=\"4\" fill=\"{color}\"/>\
             <text x=\"{:.1}\" y=\"40\">{name}</text>",
            at + 18.0
        );
        at += 34.0 + 6.8 * name.len() as f64;
    }
    for (i, panel) in panels.iter().enumerate() {
        let (left, top) = ((i % PANELS_ABREAST) as f64 * WIDTH, HEAD + (i / PANELS_ABREAST) as f64 * HEIGHT);
        match panel {
            Panel::Densities { title, x_name, curves } => {
                densities(&mut svg, (left, top), title, x_name, curves, &names);
            }
            Panel::Isolines { title, x_name, y_name, grid, step } => {
                let frame = Frame { left, top, x: span(&grid.xs), y: span(&grid.ys) };
                words(&mut svg, &frame, title, x_name, y_name);
                isolines(&mut svg, &frame, grid, *step);
            }
        }
    }
    svg + "</svg>\n"
}

/// The logarithms of the least and of the greatest.
fn span(values: &[f64]) -> (f64, f64) {
    let low = values.iter().copied().fold(f64::INFINITY, f64::min);
    let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    (low.ln(), high.ln())
}

/// A panel's title and the names of its axes.
fn words(svg: &mut String, frame: &Frame, title: &str, x_name: &str, y_name: &str) {
    let (left, _, top, _) = MARGINS;
    let (x, y) = (frame.left, frame.top);
    let _ = writeln!(svg, "<text x=\"{:.1}\" y=\"{:.1}\">{title}</text>", x + left, y + top - 16.0);
    let _ = writeln!(
        svg,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{x_name}</text>",
        x + WIDTH / 2.0,
        y + HEIGHT - 10.0
    );
    let _ = writeln!(
        svg,
        "<text x=\"{0:.1}\" y=\"{1:.1}\" text-anchor=\"middle\" transform=\"rotate(-90 {0:.1} {1:.1})\">{y_name}</text>",
        x + 16.0,
        y + HEIGHT / 2.0
    );
}

fn line(svg: &mut String, from: (f64, f64), to: (f64, f64), color: &str) {
    let _ = writeln!(
        svg,
        "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"{color}\"/>",
        from.0, from.1, to.0, to.1
    );
}

fn label(svg: &mut String, (x, y): (f64, f64), anchor: &str, text: &str) {
    let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>");
}

/// A number with a prefix of thousands: 2 k, 30 M.
fn short(value: f64) -> String {
    match value {
        v if v >= 1e6 => format!("{} M", v / 1e6),
        v if v >= 1e3 => format!("{} k", v / 1e3),
        v => format!("{v}"),
    }
}

fn densities(
    svg: &mut String,
    (left, top): (f64, f64),
    title: &str,
    x_name: &str,
    curves: &[Curve],
    names: &[&str],
) {
    let points = || curves.iter().flat_map(|curve| &curve.points).filter(|point| point.1 > 0.0);
    // Few calls are far from all others.
    let xs: Vec<f64> = points().filter(|point| point.1 > RARE).map(|point| point.0).collect();
    if xs.is_empty() {
        return;
    }
    let highest = points().map(|point| point.1).fold(0.0, f64::max);
    let (low, high) = span(&xs);
    let frame = Frame { left, top, x: (low - 0.2, high + 0.2), y: (0.0, highest * 1.05) };
    words(svg, &frame, title, x_name, "share of calls");
    line(svg, frame.at(frame.x.0, 0.0), frame.at(frame.x.1, 0.0), "#999");
    let mut tick = 1.0;
    while tick < frame.x.1.exp() {
        for value in [tick, 2.0 * tick, 5.0 * tick] {
            if (frame.x.0..frame.x.1).contains(&value.ln()) {
                let at = frame.at(value.ln(), 0.0);
                line(svg, at, frame.at(value.ln(), frame.y.1), "#ddd");
                label(svg, (at.0, at.1 + 15.0), "middle", &short(value));
            }
        }
        tick *= 10.0;
    }
    for curve in curves {
        let color =
            names.iter().position(|name| *name == curve.name).map_or("#000", |i| COLORS[i % COLORS.len()]);
        let drawn: Vec<String> = curve
            .points
            .iter()
            .filter(|point| (frame.x.0..=frame.x.1).contains(&point.0.ln()))
            .map(|point| {
                let (x, y) = frame.at(point.0.ln(), point.1);
                format!("{x:.1},{y:.1}")
            })
            .collect();
        let _ = writeln!(
            svg,
            "<polyline fill=\"none\" stroke=\"{color}\" stroke-width=\"1.5\" points=\"{}\"/>",
            drawn.join(" ")
        );
    }
}

/// Where a line of equal value crosses the edge between two corners; `None` if it does not.
fn crossing(level: f64, from: ((f64, f64), f64), to: ((f64, f64), f64)) -> Option<(f64, f64)> {
    let ((a, from), (b, to)) = (from, to);
    if (from < level) == (to < level) {
        return None;
    }
    let part = (level - from) / (to - from);
    Some((a.0 + part * (b.0 - a.0), a.1 + part * (b.1 - a.1)))
}

fn isolines(svg: &mut String, frame: &Frame, grid: &Grid, step: f64) {
    let (columns, rows) = (grid.xs.len(), grid.ys.len());
    let corner = |x: usize, y: usize| (frame.at(grid.xs[x].ln(), grid.ys[y].ln()), grid.values[y][x]);
    for (x, value) in grid.xs.iter().enumerate() {
        line(svg, corner(x, 0).0, corner(x, rows - 1).0, "#eee");
        let at = corner(x, 0).0;
        label(svg, (at.0, at.1 + 15.0), "middle", &format!("{value}"));
    }
    for (y, value) in grid.ys.iter().enumerate() {
        line(svg, corner(0, y).0, corner(columns - 1, y).0, "#eee");
        let at = corner(0, y).0;
        label(svg, (at.0 - 6.0, at.1 + 4.0), "end", &format!("{value}"));
    }
    let all = || grid.values.iter().flatten().copied();
    let (lowest, highest) = (all().fold(f64::INFINITY, f64::min), all().fold(f64::NEG_INFINITY, f64::max));
    let mut labels: Vec<(f64, f64)> = Vec::new();
    let mut count = (lowest / step).ceil();
    while count * step <= highest {
        let level = count * step;
        let mut first = None;
        for x in 0..columns - 1 {
            for y in 0..rows - 1 {
                let [a, b, c, d] = [corner(x, y), corner(x + 1, y), corner(x + 1, y + 1), corner(x, y + 1)];
                let ends: Vec<_> = [
                    crossing(level, a, b),
                    crossing(level, b, c),
                    crossing(level, c, d),
                    crossing(level, d, a),
                ]
                .into_iter()
                .flatten()
                .collect();
                // Four ends are a saddle, which two lines pass.
                for pair in ends.chunks_exact(2) {
                    line(svg, pair[0], pair[1], COLORS[1]);
                    first.get_or_insert(pair[0]);
                }
            }
        }
        let is_free = |at: &(f64, f64)| {
            labels.iter().all(|other| (other.0 - at.0).hypot(other.1 - at.1) > LABELS_APART)
        };
        if let Some((x, y)) = first.filter(is_free) {
            labels.push((x, y));
            let _ = writeln!(
                svg,
                "<text x=\"{x:.1}\" y=\"{y:.1}\" fill=\"{}\" font-size=\"10\">{:.2}</text>",
                COLORS[1], level
            );
        }
        count += 1.0;
    }
    for y in 0..rows {
        for x in 0..columns {
            let ((at_x, at_y), value) = corner(x, y);
            let _ = writeln!(
                svg,
                "<circle cx=\"{at_x:.1}\" cy=\"{at_y:.1}\" r=\"2\" fill=\"{0}\"/>\
                 <text x=\"{at_x:.1}\" y=\"{1:.1}\" text-anchor=\"middle\" font-size=\"9\" fill=\"{0}\">{value:.2}</text>",
                COLORS[0],
                at_y - 5.0
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_of_equal_value_crosses_an_edge_where_the_value_is_reached() {
        assert_eq!(crossing(0.5, ((0.0, 0.0), 0.0), ((10.0, 20.0), 1.0)), Some((5.0, 10.0)));
        assert_eq!(crossing(0.25, ((0.0, 0.0), 1.0), ((8.0, 0.0), 0.0)), Some((6.0, 0.0)));
        assert_eq!(crossing(2.0, ((0.0, 0.0), 0.0), ((1.0, 0.0), 1.0)), None);
    }

    #[test]
    fn isolines_of_a_slope_are_parallel_to_the_other_axis() {
        let grid = Grid { xs: vec![1.0, 2.0, 4.0], ys: vec![1.0, 2.0], values: vec![vec![0.0, 1.0, 2.0]; 2] };
        let panel = Panel::Isolines { title: "t".into(), x_name: "x", y_name: "y", grid, step: 0.5 };
        let picture = svg("p", &[panel]);
        let lines: Vec<&str> =
            picture.lines().filter(|line| line.contains(COLORS[1]) && line.starts_with("<line")).collect();
        // Levels 0.5, 1, 1.5, 2 within the grid; the one at the last column is on its edge.
        assert!(lines.len() >= 3, "{picture}");
        for line in lines {
            let number =
                |name: &str| line.split(&format!("{name}=\"")).nth(1).and_then(|rest| rest.split('"').next());
            assert_eq!(number("x1"), number("x2"), "{line}");
        }
    }

    #[test]
    fn density_is_drawn_within_its_frame() {
        let curve = Curve { name: "put".into(), points: vec![(100.0, 0.0), (1000.0, 0.5), (10_000.0, 0.1)] };
        let picture = svg("p", &[Panel::Densities { title: "t".into(), x_name: "ns", curves: vec![curve] }]);
        let points = picture.split("points=\"").nth(1).and_then(|rest| rest.split('"').next()).unwrap();
        let xs: Vec<f64> =
            points.split(' ').map(|point| point.split(',').next().unwrap().parse().unwrap()).collect();
        assert_eq!(xs.len(), 2, "the empty class is before the axis: {points}");
        assert!(xs.iter().all(|x| (60.0..=440.0).contains(x)) && xs[0] < xs[1], "{points}");
        assert!(picture.contains(">1 k<") && picture.contains(">10 k<"), "{picture}");
    }
}
