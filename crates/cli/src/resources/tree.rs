//! A document as a tree whose nodes know their lines: TOML and YAML alike.

use saphyr::{LoadableYamlNode, MarkedYaml, Scalar, YamlData};
use toml::de::{DeTable, DeValue};
use toml::Spanned;

/// A value, and the line where it begins.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) line: usize,
    pub(super) value: Value,
}

/// The kinds of values.
#[derive(Debug)]
pub(super) enum Value {
    /// A string, or a number as it is written.
    Text(String),
    Flag(bool),
    List(Vec<Node>),
    /// Keys in the order of the file, with their lines.
    Table(Vec<(String, usize, Node)>),
    /// Something that no resources file has: a date, null.
    Other,
}

impl Node {
    /// The keys of a table, with their lines and values. A list of single pairs is a table: so echofs writes them.
    pub(super) fn entries(&self) -> Option<Vec<(&str, usize, &Node)>> {
        match &self.value {
            Value::Table(entries) => {
                Some(entries.iter().map(|(key, line, node)| (&**key, *line, node)).collect())
            }
            Value::List(nodes) if !nodes.is_empty() => nodes.iter().map(Node::pair).collect(),
            _ => None,
        }
    }

    fn pair(&self) -> Option<(&str, usize, &Node)> {
        match &self.value {
            Value::Table(entries) => match &entries[..] {
                [(key, line, node)] => Some((key, *line, node)),
                _ => None,
            },
            _ => None,
        }
    }

    pub(super) fn get(&self, key: &str) -> Option<&Node> {
        self.entries()?.into_iter().find(|(name, ..)| *name == key).map(|(_, _, node)| node)
    }
}

/// Why a document is none: the line, and the reason.
type Failed = (usize, String);

/// Reads TOML.
pub(super) fn of_toml(text: &str) -> Result<Node, Failed> {
    let line_of = |offset: usize| 1 + text.bytes().take(offset).filter(|b| *b == b'\n').count();
    let root = DeTable::parse(text).map_err(|e| {
        let line = e.span().map_or(1, |span| line_of(span.start));
        (line, e.message().lines().collect::<Vec<_>>().join(", "))
    })?;
    Ok(Node { line: 1, value: table(root.get_ref(), &line_of) })
}

fn table(entries: &DeTable<'_>, line_of: &dyn Fn(usize) -> usize) -> Value {
    let mut all: Vec<_> = entries.iter().collect();
    all.sort_by_key(|(key, _)| key.span().start);
    let all = all.into_iter().map(|(key, value)| {
        (key.get_ref().to_string(), line_of(key.span().start), toml_node(value, line_of))
    });
    Value::Table(all.collect())
}

fn toml_node(node: &Spanned<DeValue<'_>>, line_of: &dyn Fn(usize) -> usize) -> Node {
    let value = match node.get_ref() {
        DeValue::String(text) => Value::Text(text.to_string()),
        DeValue::Integer(number) => Value::Text(number.as_str().to_owned()),
        DeValue::Float(number) => Value::Text(number.as_str().to_owned()),
        DeValue::Boolean(flag) => Value::Flag(*flag),
        DeValue::Datetime(_) => Value::Other,
        DeValue::Array(list) => Value::List(list.iter().map(|node| toml_node(node, line_of)).collect()),
        DeValue::Table(entries) => table(entries, line_of),
    };
    Node { line: line_of(node.span().start), value }
}

/// Reads the one document of a YAML file.
pub(super) fn of_yaml(text: &str) -> Result<Node, Failed> {
    let documents = MarkedYaml::load_from_str(text).map_err(|e| (e.marker().line(), e.info().to_owned()))?;
    match &documents[..] {
        [document] => yaml_node(document),
        [] => Err((1, "it is empty".to_owned())),
        [_, second, ..] => Err((second.span.start.line(), "it has several documents".to_owned())),
    }
}

fn yaml_node(node: &MarkedYaml<'_>) -> Result<Node, Failed> {
    let line = node.span.start.line();
    let value = match &node.data {
        YamlData::Value(Scalar::String(text)) => Value::Text(text.to_string()),
        YamlData::Value(Scalar::Integer(number)) => Value::Text(number.to_string()),
        YamlData::Value(Scalar::Boolean(flag)) => Value::Flag(*flag),
        YamlData::Value(Scalar::FloatingPoint(number)) => Value::Text(number.to_string()),
        YamlData::Sequence(list) => Value::List(list.iter().map(yaml_node).collect::<Result<_, _>>()?),
        YamlData::Mapping(entries) => {
            let mut all = Vec::new();
            for (key, value) in entries {
                let Some(name) = key.data.as_str() else {
                    return Err((key.span.start.line(), "a key is no text".to_owned()));
                };
                all.push((name.to_owned(), key.span.start.line(), yaml_node(value)?));
            }
            Value::Table(all)
        }
        _ => Value::Other,
    };
    Ok(Node { line, value })
}
