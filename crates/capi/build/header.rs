//! Reads include/forebay.h: its functions, structs and constants. The build script and the tests compile this file.
//!
//! It understands only the C that the header uses. A declaration that it does not understand ends the build.

/// A function's declaration.
pub(crate) struct Function {
    /// The C type that it returns.
    pub(crate) returns: String,
    /// Its name.
    pub(crate) name: String,
    /// Its parameters.
    pub(crate) parameters: Vec<Variable>,
}

/// A parameter, or a member of a struct.
#[derive(Clone)]
pub(crate) struct Variable {
    /// Its C type, such as `const char *` or `char[256]`.
    pub(crate) kind: String,
    /// Its name.
    pub(crate) name: String,
}

/// A struct and its members.
pub(crate) struct Struct {
    /// Its tag.
    pub(crate) name: String,
    /// Its members.
    pub(crate) members: Vec<Variable>,
}

/// The declarations of the header.
#[derive(Default)]
pub(crate) struct Header {
    /// In the header's order.
    pub(crate) functions: Vec<Function>,
    /// The structs with members.
    pub(crate) structs: Vec<Struct>,
    /// Macros with a number: name and number as written.
    pub(crate) constants: Vec<(String, String)>,
}

/// The header in the crate's directory `root`.
pub(crate) fn read(root: &std::path::Path) -> Header {
    let path = root.join("include/forebay.h");
    parse(&std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display())))
}

fn parse(text: &str) -> Header {
    let mut header = Header::default();
    let text = without_comments(text);
    let (mut code, mut is_for_cpp) = (String::new(), false);
    for line in text.lines() {
        match line.split_whitespace().collect::<Vec<_>>()[..] {
            ["#ifdef", "__cplusplus"] => is_for_cpp = true,
            ["#endif"] => is_for_cpp = false,
            ["#define", name, number] => header.constants.push((name.into(), number.into())),
            [first, ..] if first.starts_with('#') => {}
            _ if is_for_cpp => {}
            _ => code.extend([line, " "]),
        }
    }
    for statement in statements(&code) {
        if statement.starts_with("typedef ") {
        } else if let Some((head, members)) = statement.split_once('{') {
            let name =
                head.trim().strip_prefix("struct ").unwrap_or_else(|| panic!("not a struct: {statement}"));
            let members = members.trim_end_matches('}').split_terminator(';').map(str::trim);
            let members = members.filter(|member| !member.is_empty()).flat_map(variables).collect();
            header.structs.push(Struct { name: name.into(), members });
        } else {
            header.functions.push(function(&statement));
        }
    }
    header
}

fn without_comments(text: &str) -> String {
    let mut parts = text.split("/*");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |code, part| code + part.split_once("*/").expect("comments end").1)
}

/// The text before each `;` that is outside braces, with single spaces.
fn statements(code: &str) -> Vec<String> {
    let mut depth = 0;
    let parts = code.split(|c: char| {
        depth += i32::from(c == '{') - i32::from(c == '}');
        c == ';' && depth == 0
    });
    parts
        .map(|part| part.split_whitespace().collect::<Vec<_>>().join(" "))
        .filter(|s| !s.is_empty())
        .collect()
}

fn function(declaration: &str) -> Function {
    let parts = declaration.strip_suffix(')').and_then(|rest| rest.split_once('('));
    let (head, parameters) = parts.unwrap_or_else(|| panic!("not a function: {declaration}"));
    let head = variable(head);
    let parameters = parameters.split(", ").map(variable).collect();
    Function { returns: head.kind, name: head.name, parameters }
}

/// The variables of a declaration such as `uint64_t files, bytes`.
fn variables(declaration: &str) -> Vec<Variable> {
    let mut names = declaration.split(", ");
    let first = variable(names.next().unwrap_or_default());
    let others = names.map(|name| Variable { kind: first.kind.clone(), name: name.into() });
    std::iter::once(first.clone()).chain(others).collect()
}

fn variable(declaration: &str) -> Variable {
    let (declared, array) = declaration.split_at(declaration.find('[').unwrap_or(declaration.len()));
    let name = declared.rsplit([' ', '*']).next().unwrap_or_default();
    let kind = declared.strip_suffix(name).unwrap_or_default().trim();
    assert!(!kind.is_empty() && !name.is_empty(), "not a declaration: {declaration}");
    Variable { kind: format!("{kind}{array}"), name: name.into() }
}
