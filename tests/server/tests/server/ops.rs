//! What `ops/` offers for monitoring: the exporter's queries run, and the dashboard asks for nothing that they do not give.

use std::collections::{BTreeMap, BTreeSet};

use harvest_fair_server_tests::{Cluster, claim, flood};
use postgres::Client;
use serde_json::Value;

use crate::support::execute;

const EXPORTER: &str = include_str!("../../../../ops/sql_exporter.yml");
const DASHBOARD: &str = include_str!("../../../../ops/grafana.json");
const GUIDE: &str = include_str!("../../../../ops/README.md");

#[derive(Debug, Default)]
struct Metric {
    name: String,
    kind: String,
    key_labels: Vec<String>,
    value_label: Option<String>,
    values: Vec<String>,
    query: String,
}

impl Metric {
    fn labels(&self) -> BTreeSet<&str> {
        let labels = self.key_labels.iter().chain(&self.value_label);
        labels.map(String::as_str).collect()
    }
}

/// `[a, 'b']`
fn list(text: &str) -> Vec<String> {
    let items = text.trim_matches(['[', ']']).split(", ");
    items
        .map(|item| item.trim_matches('\'').to_owned())
        .collect()
}

/// The metrics and the queries, by name, of the exporter's file, as far as it is written the way it is.
fn exported() -> (Vec<Metric>, BTreeMap<String, String>) {
    let (mut metrics, mut queries) = (Vec::<Metric>::new(), BTreeMap::new());
    let mut query = None;
    for line in EXPORTER.lines() {
        let (indent, text) = (line.len() - line.trim_start().len(), line.trim());
        if let Some(name) = text.strip_prefix("- query_name: ") {
            query = Some(name.to_owned());
        } else if let Some(name) = text.strip_prefix("- metric_name: ") {
            query = None;
            metrics.push(Metric {
                name: name.to_owned(),
                ..Metric::default()
            });
        } else if let (Some(query), true) = (&query, indent >= 10) {
            let sql: &mut String = queries.entry(query.clone()).or_default();
            sql.push_str(text);
            sql.push('\n');
        } else if let (Some((field, value)), Some(metric), 8) =
            (text.split_once(": "), metrics.last_mut(), indent)
        {
            match field {
                "type" => metric.kind = value.to_owned(),
                "key_labels" => metric.key_labels = list(value),
                "value_label" => metric.value_label = Some(value.to_owned()),
                "values" => metric.values = list(value),
                "query_ref" => metric.query = value.to_owned(),
                "help" | "query" => {}
                other => panic!("unknown field {other}"),
            }
        }
    }
    (metrics, queries)
}

/// Every query gives every column that its metrics name, and a row.
fn run_all(client: &mut Client) {
    let (metrics, queries) = exported();
    assert!(metrics.len() > 15 && queries.len() == 4);
    for metric in &metrics {
        let sql = &queries[&metric.query];
        let rows = client
            .query(sql.as_str(), &[])
            .unwrap_or_else(|error| panic!("{sql}{error:?}"));
        let row = rows.first().unwrap_or_else(|| panic!("{sql}gave no row"));
        let columns: Vec<&str> = row.columns().iter().map(|column| column.name()).collect();
        for wanted in metric.key_labels.iter().chain(&metric.values) {
            assert!(
                columns.contains(&wanted.as_str()),
                "{wanted} of {}",
                metric.name
            );
        }
        // The exporter wants a label for the name where there are several values.
        assert_eq!(
            metric.values.len() > 1,
            metric.value_label.is_some(),
            "{}",
            metric.name
        );
        let counts_up = metric.name.ends_with("_total");
        assert_eq!(metric.kind, if counts_up { "counter" } else { "gauge" });
        assert!(metric.values.len() < 2 || !metric.key_labels.contains(&metric.values[0]));
    }
    let used: BTreeSet<&String> = metrics.iter().map(|metric| &metric.query).collect();
    assert!(queries.keys().all(|query| used.contains(query)));
}

#[test]
fn the_exporters_queries_run_with_the_rights_that_the_guide_grants() {
    let db = Cluster::shared().database();
    let mut owner = db.connect();
    flood(&mut owner, "q", "A", 9, "1 min");
    claim(&mut owner, "q", "w", 3);
    let grants = GUIDE
        .split("grant it this instead\n\n```sql\n")
        .nth(1)
        .unwrap();
    let grants = grants.split("```").next().unwrap();
    let bundle = "SELECT fair_grant('metrics', 'admin');";
    assert!(GUIDE.contains(bundle) && EXPORTER.contains(bundle));
    for (role, grant) in [("ops_admin", bundle), ("ops_reader", grants)] {
        execute(&mut owner, &format!("CREATE ROLE {role} LOGIN"));
        owner
            .batch_execute(&grant.replace("metrics", role))
            .unwrap();
        run_all(&mut db.connect_as(role));
        owner
            .batch_execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}"))
            .unwrap();
    }
}

/// The metrics that an expression names, each with the labels that it names of it.
fn asked(expression: &str) -> Vec<(String, Vec<String>)> {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut asked = Vec::new();
    for (at, _) in expression.match_indices("harvest_fair_") {
        let rest = &expression[at..];
        let end = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
        let (name, rest) = rest.split_at(end);
        let inner = rest
            .strip_prefix('{')
            .and_then(|rest| rest.split('}').next());
        let labels = inner.map_or(Vec::new(), |inner| {
            let names = inner
                .split(", ")
                .map(|pair| pair.split(['=', '!']).next().unwrap().to_owned());
            names.collect()
        });
        asked.push((name.to_owned(), labels));
    }
    asked
}

/// The names in `by (a, b)` and `{{a}}`.
fn named(text: &str, start: &str, end: &str) -> Vec<String> {
    let parts = text.split(start).skip(1);
    let inner = parts.flat_map(|part| part.split(end).next().unwrap().split(", "));
    inner.map(str::to_owned).collect()
}

#[test]
fn the_dashboard_asks_only_for_what_the_exporter_gives() {
    let (metrics, _) = exported();
    let known: BTreeMap<&str, &Metric> = metrics.iter().map(|m| (m.name.as_str(), m)).collect();
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let mut used = BTreeSet::new();
    let mut ids = BTreeSet::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        assert!(ids.insert(panel["id"].as_i64().unwrap()));
        let Some(targets) = panel["targets"].as_array() else {
            assert_eq!(panel["type"], "row");
            continue;
        };
        for target in targets {
            let expression = target["expr"].as_str().unwrap();
            let metrics = asked(expression);
            assert!(!metrics.is_empty(), "{expression}");
            let mut labels = BTreeSet::new();
            for (name, named) in &metrics {
                let metric = known
                    .get(name.as_str())
                    .unwrap_or_else(|| panic!("{name} is not exported"));
                used.insert(name.clone());
                labels.extend(metric.labels());
                for label in named {
                    assert!(
                        metric.labels().contains(label.as_str()),
                        "{label} in {expression}"
                    );
                }
                let is_rate = ["rate(", "increase("]
                    .iter()
                    .any(|of| expression.contains(&format!("{of}{name}")));
                assert!(!is_rate || metric.kind == "counter", "{expression}");
            }
            let legend = target["legendFormat"].as_str().unwrap();
            for label in named(expression, "by (", ")")
                .into_iter()
                .chain(named(legend, "{{", "}}"))
            {
                assert!(
                    labels.contains(label.as_str()),
                    "{label} in {expression} {legend}"
                );
            }
        }
    }
    for variable in dashboard["templating"]["list"].as_array().unwrap() {
        for (name, _) in asked(variable["definition"].as_str().unwrap_or("")) {
            assert!(known.contains_key(name.as_str()), "{name}");
        }
    }
    for name in GUIDE.lines().flat_map(asked).map(|(name, _)| name) {
        let is_metric = known.contains_key(name.as_str());
        assert!(
            is_metric || name == "harvest_fair_backlog",
            "{name} in the guide"
        );
    }
    for name in [
        "harvest_fair_missed_wakeups_total",
        "harvest_fair_tasks",
        "harvest_fair_expired_leases_total",
    ] {
        assert!(used.contains(name), "{name}");
    }
}
