//! Curves over time as SVG: a small picture without a library.

/// A curve.
pub(super) struct Curve {
    pub(super) name: &'static str,
    pub(super) color: &'static str,
    /// Seconds, and megabytes.
    pub(super) points: Vec<(f64, f64)>,
}

const WIDTH: f64 = 880.0;
const HEIGHT: f64 = 440.0;
/// Margins: left, right, top, bottom.
const MARGINS: (f64, f64, f64, f64) = (70.0, 20.0, 60.0, 50.0);

/// A number of the form 1, 2 or 5 times a power of ten, so that about six of them make `most`.
fn step(most: f64) -> f64 {
    let rough = (most / 6.0).max(1e-9);
    let power = 10f64.powf(rough.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|n| n * power).find(|n| *n >= rough).unwrap_or(rough)
}

/// The picture. `spans` are drawn as bars at the bottom: from, to, in seconds, with a name for all of them.
pub(super) fn svg(title: &str, curves: &[Curve], spans: (&str, &[(f64, f64)])) -> String {
    let points = || curves.iter().flat_map(|curve| &curve.points);
    let x_max = points().map(|p| p.0).fold(1e-3, f64::max);
    let y_max = points().map(|p| p.1).fold(1e-3, f64::max) * 1.05;
    let (left, right, top, bottom) = MARGINS;
    let x = |seconds: f64| left + seconds / x_max * (WIDTH - left - right);
    let y = |megabytes: f64| HEIGHT - bottom - megabytes / y_max * (HEIGHT - top - bottom);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
         viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"{left}\" y=\"20\" font-size=\"14\">{title}</text>\n"
    );
    let mut line = |x1: f64, y1: f64, x2: f64, y2: f64| {
        svg +=
            &format!("<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"#ddd\"/>\n");
    };
    let ticks = |most: f64| (0..).map(move |i| f64::from(i) * step(most)).take_while(move |v| *v <= most);
    ticks(x_max).for_each(|v| line(x(v), top, x(v), HEIGHT - bottom));
    ticks(y_max).for_each(|v| line(left, y(v), WIDTH - right, y(v)));
    for v in ticks(x_max) {
        svg += &format!(
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{v}</text>\n",
            x(v),
            HEIGHT - bottom + 16.0
        );
    }
    for v in ticks(y_max) {
        svg += &format!(
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{v}</text>\n",
            left - 6.0,
            y(v) + 4.0
        );
    }
    svg += &format!(
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">seconds</text>\n",
        WIDTH / 2.0,
        HEIGHT - 12.0
    );
    svg += &format!("<text x=\"8\" y=\"{:.1}\">MB</text>\n", top - 8.0);
    let (name, spans) = spans;
    let legend = curves.iter().map(|curve| (curve.name, curve.color)).chain([(name, "#999")]);
    let mut at = left;
    for (name, color) in legend {
        svg += &format!(
            "<rect x=\"{at:.1}\" y=\"33\" width=\"14\" height=\"4\" fill=\"{color}\"/>\
             <text x=\"{:.1}\" y=\"39\">{name}</text>\n",
            at + 18.0
        );
        at += 34.0 + 6.8 * name.len() as f64;
    }
    for (from, to) in spans {
        svg += &format!(
            "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"6\" fill=\"#999\"/>\n",
            x(*from),
            HEIGHT - bottom - 8.0,
            (x(*to) - x(*from)).max(1.0)
        );
    }
    for curve in curves {
        let points: Vec<_> = curve.points.iter().map(|p| format!("{:.1},{:.1}", x(p.0), y(p.1))).collect();
        svg += &format!(
            "<polyline fill=\"none\" stroke=\"{}\" stroke-width=\"2\" points=\"{}\"/>\n",
            curve.color,
            points.join(" ")
        );
    }
    svg + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_is_1_2_or_5_times_a_power_of_ten() {
        assert_eq!(step(6.0), 1.0);
        assert_eq!(step(60.0), 10.0);
        assert_eq!(step(1000.0), 200.0);
        assert_eq!(step(28.0), 5.0);
    }

    #[test]
    fn picture_has_every_curve_within_its_frame() {
        let curve = Curve { name: "a", color: "red", points: vec![(0.0, 0.0), (2.0, 300.0)] };
        let picture = svg("t", &[curve], ("reads", &[(0.5, 1.0)]));
        assert!(picture.contains("points=\"70.0,390.0 860.0,"), "{picture}");
        assert!(picture.ends_with("</svg>\n"));
    }
}
