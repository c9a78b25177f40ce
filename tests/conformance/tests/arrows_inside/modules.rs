//! Reads the modules of a crate and resolves the paths in them to the files that define what the paths name.

use crate::cycles::Graph;
use proc_macro2::{TokenStream, TokenTree};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use syn::visit::{self, Visit};
use syn::{Attribute, ImplItem, Item, ItemMacro, ItemMod, ItemUse, Macro, Stmt, UseTree, Visibility};

type Names = Vec<String>;

#[derive(Default)]
struct Module {
    /// The module whose file holds this one: itself, or the one around an inline module.
    file: Names,
    items: BTreeSet<String>,
    children: BTreeSet<String>,
    /// Names that a `use` brings into scope, with their paths.
    imported: BTreeMap<String, Names>,
    /// The names among `imported` that are `pub use`.
    re_exported: BTreeSet<String>,
    /// Paths of `use path::*`.
    globs: Vec<Names>,
    /// All other paths, and those of `use` without `pub`.
    paths: BTreeSet<Names>,
}

/// The text of the file at a path, if there is one.
pub(crate) type Files<'a> = &'a dyn Fn(&Path) -> Option<String>;

struct Crate<'a> {
    files: Files<'a>,
    modules: BTreeMap<Names, Module>,
    /// Modules that define a macro, by its name: such macros have textual scope.
    macros: BTreeMap<String, Names>,
}

/// The arrows between the modules of the crate with the root file `root`.
pub(crate) fn read(root: &Path, files: Files) -> Graph {
    let mut all = Crate { files, modules: BTreeMap::new(), macros: BTreeMap::new() };
    let folder = root.parent().expect("a root file lies in a folder");
    all.read_file(root, folder, &[]);
    let mut graph = Graph::default();
    let name = |file: &Names| if file.is_empty() { "crate".to_owned() } else { file.join("::") };
    for (scope, module) in &all.modules {
        for path in &module.paths {
            if let Some(definer) = all.resolve(scope, path, 0) {
                graph.add(&name(&module.file), &name(&all.modules[&definer].file), &path.join("::"));
            }
        }
    }
    graph
}

impl Crate<'_> {
    fn read_file(&mut self, path: &Path, folder: &Path, module: &[String]) {
        let text = (self.files)(path).unwrap_or_else(|| panic!("{} cannot be read", path.display()));
        let file = syn::parse_file(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        self.modules.insert(module.into(), Module { file: module.into(), ..Module::default() });
        let mut reader = Reader { all: self, module: module.into(), folder: folder.into() };
        file.items.iter().for_each(|item| reader.visit_item(item));
    }

    /// The module that defines what `path` names in `scope`; none if another crate does, or if the path names a module.
    fn resolve(&self, scope: &Names, path: &[String], depth: usize) -> Option<Names> {
        let (first, rest) = path.split_first()?;
        match first.as_str() {
            "crate" => self.walk(Names::new(), rest, depth),
            "self" => self.walk(scope.clone(), rest, depth),
            "super" => self.walk(scope.split_last()?.1.to_vec(), rest, depth),
            _ if self.knows(scope, first, depth) => self.walk(scope.clone(), path, depth),
            macro_name if rest.is_empty() => self.macros.get(macro_name.strip_suffix('!')?).cloned(),
            _ => None,
        }
    }

    fn walk(&self, mut at: Names, path: &[String], depth: usize) -> Option<Names> {
        // Without a limit, modules whose globs import each other would cause endless recursion.
        if depth > 20 {
            return None;
        }
        for (i, name) in path.iter().enumerate() {
            let module = &self.modules[&at];
            if name == "super" {
                at.pop();
            } else if module.children.contains(name) {
                at.push(name.clone());
            } else if module.items.contains(name) {
                return Some(at);
            } else if let Some(imported) = module.imported.get(name) {
                let whole: Names = imported.iter().chain(&path[i + 1..]).cloned().collect();
                // A path that begins with its own name (`use log::log`) names another crate.
                return if imported.first() == Some(name) {
                    None
                } else {
                    self.resolve(&at, &whole, depth + 1)
                };
            } else {
                let through = module.globs.iter().find_map(|glob| {
                    let whole: Names = glob.iter().chain(&path[i..]).cloned().collect();
                    self.glob_knows(&at, glob, name, depth).then(|| self.resolve(&at, &whole, depth + 1))
                });
                // The item may be defined by a macro, so that no item of the file has its name.
                return through.unwrap_or(Some(at));
            }
        }
        None
    }

    fn knows(&self, scope: &Names, name: &str, depth: usize) -> bool {
        self.modules[scope].imported.contains_key(name) || self.shows(scope, name, depth)
    }

    /// True if other modules can name `name` in this module, not only the module itself and its children.
    fn shows(&self, scope: &Names, name: &str, depth: usize) -> bool {
        let module = &self.modules[scope];
        let names = [&module.children, &module.items, &module.re_exported];
        names.iter().any(|names| names.contains(name))
            || module.globs.iter().any(|glob| self.glob_knows(scope, glob, name, depth))
    }

    fn glob_knows(&self, scope: &Names, glob: &[String], name: &str, depth: usize) -> bool {
        let of = self.module_at(scope, glob, depth).filter(|of| of != scope && depth < 20);
        of.is_some_and(|of| {
            let known = if scope.starts_with(&of) { Self::knows } else { Self::shows };
            known(self, &of, name, depth + 1)
        })
    }

    /// The module that `path` names in `scope`.
    fn module_at(&self, scope: &Names, path: &[String], depth: usize) -> Option<Names> {
        let mut at = if path.first()? == "crate" { Names::new() } else { scope.clone() };
        for (i, name) in path.iter().enumerate() {
            match name.as_str() {
                "crate" | "self" => {}
                "super" => drop(at.pop()),
                _ if self.modules[&at].children.contains(name) => at.push(name.clone()),
                _ => {
                    let imported = self.modules[&at].imported.get(name).filter(|_| depth < 20)?;
                    let whole: Names = imported.iter().chain(&path[i + 1..]).cloned().collect();
                    return self.module_at(&at, &whole, depth + 1);
                }
            }
        }
        Some(at)
    }
}

/// Records the definitions and paths of one file, and reads the files of the modules that it declares.
struct Reader<'a, 'f> {
    all: &'a mut Crate<'f>,
    module: Names,
    /// Where the files of child modules lie.
    folder: PathBuf,
}

impl Reader<'_, '_> {
    fn here(&mut self) -> &mut Module {
        self.all.modules.get_mut(&self.module).expect("the module is being read")
    }

    fn import(&mut self, tree: &UseTree, prefix: &[String], re_export: bool) {
        let joined = |name: &syn::Ident| {
            // `use a::{self}` names a.
            let own = (name != "self" || prefix.is_empty()).then(|| name.to_string());
            prefix.iter().cloned().chain(own).collect::<Names>()
        };
        let mut bind = |name: Option<String>, path: Names| {
            let here = self.here();
            here.re_exported.extend(name.clone().filter(|_| re_export));
            here.imported.extend(name.map(|name| (name, path.clone())));
            if !re_export {
                here.paths.insert(path);
            }
        };
        match tree {
            UseTree::Path(path) => self.import(&path.tree, &joined(&path.ident), re_export),
            UseTree::Group(group) => group.items.iter().for_each(|item| self.import(item, prefix, re_export)),
            UseTree::Glob(_) => self.here().globs.push(prefix.into()),
            UseTree::Name(name) => {
                let path = joined(&name.ident);
                bind(path.last().cloned(), path);
            }
            UseTree::Rename(rename) => {
                let name = (rename.rename != "_").then(|| rename.rename.to_string());
                bind(name, joined(&rename.ident));
            }
        }
    }

    /// Records the paths among tokens that are not parsed: all paths such as `a::b`, or with `only_crate` only those
    /// that begin with `crate`.
    fn tokens(&mut self, tokens: TokenStream, only_crate: bool) {
        let mut path = Names::new();
        let mut colons = 2;
        for token in tokens {
            match token {
                TokenTree::Punct(punct) if punct.as_char() == ':' && !path.is_empty() => {
                    colons += 1;
                    continue;
                }
                TokenTree::Ident(ident) if colons == 2 => {
                    path.push(ident.to_string());
                    colons = 0;
                    continue;
                }
                _ => {}
            }
            self.note_tokens(std::mem::take(&mut path), only_crate);
            colons = 2;
            match token {
                TokenTree::Ident(ident) => {
                    path.push(ident.to_string());
                    colons = 0;
                }
                TokenTree::Group(group) => self.tokens(group.stream(), only_crate),
                _ => {}
            }
        }
        self.note_tokens(path, only_crate);
    }

    fn note_tokens(&mut self, path: Names, only_crate: bool) {
        if !path.is_empty() && (!only_crate || path[0] == "crate") {
            self.here().paths.insert(path);
        }
    }

    fn module(&mut self, module: &ItemMod) {
        let name = module.ident.to_string();
        self.here().children.insert(name.clone());
        let inner: Names = self.module.iter().chain([&name]).cloned().collect();
        let folder = self.folder.join(&name);
        if let Some((_, items)) = &module.content {
            let file = self.here().file.clone();
            self.all.modules.insert(inner.clone(), Module { file, ..Module::default() });
            let mut reader = Reader { all: self.all, module: inner, folder };
            return items.iter().for_each(|item| reader.visit_item(item));
        }
        if module.attrs.iter().any(|attribute| attribute.path().is_ident("path")) {
            // The file belongs to another crate, and is read with that crate.
            return drop(self.all.modules.insert(inner.clone(), Module { file: inner, ..Module::default() }));
        }
        let beside = self.folder.join(format!("{name}.rs"));
        let file = if (self.all.files)(&beside).is_some() { beside } else { folder.join("mod.rs") };
        self.all.read_file(&file, &folder, &inner);
    }
}

impl<'ast> Visit<'ast> for Reader<'_, '_> {
    fn visit_item(&mut self, item: &'ast Item) {
        if only_tests(attributes(item)) {
            return;
        }
        self.here().items.extend(defined(item));
        visit::visit_item(self, item);
    }

    fn visit_item_mod(&mut self, module: &'ast ItemMod) {
        self.module(module);
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        if item.leading_colon.is_none() {
            self.import(&item.tree, &[], !matches!(item.vis, Visibility::Inherited));
        }
    }

    fn visit_item_macro(&mut self, item: &'ast ItemMacro) {
        match &item.ident {
            Some(name) => {
                self.all.macros.insert(name.to_string(), self.module.clone());
                self.tokens(item.mac.tokens.clone(), true);
            }
            None => self.visit_macro(&item.mac),
        }
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        let attributes = match item {
            ImplItem::Fn(item) => &item.attrs[..],
            ImplItem::Const(item) => &item.attrs,
            _ => &[],
        };
        if !only_tests(attributes) {
            visit::visit_impl_item(self, item);
        }
    }

    fn visit_stmt(&mut self, statement: &'ast Stmt) {
        if !matches!(statement, Stmt::Local(local) if only_tests(&local.attrs)) {
            visit::visit_stmt(self, statement);
        }
    }

    fn visit_macro(&mut self, call: &'ast Macro) {
        let mut path: Names = call.path.segments.iter().map(|s| s.ident.to_string()).collect();
        if let [name] = &mut path[..] {
            if !self.here().imported.contains_key(name) {
                name.push('!');
            }
        }
        self.here().paths.insert(path);
        self.tokens(call.tokens.clone(), false);
    }

    fn visit_visibility(&mut self, _: &'ast Visibility) {}

    fn visit_attribute(&mut self, _: &'ast Attribute) {}

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() {
            let names = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
            self.here().paths.insert(names);
        }
        visit::visit_path(self, path);
    }
}

fn only_tests(attributes: &[Attribute]) -> bool {
    let test = |attribute: &Attribute| {
        let condition = attribute.path().is_ident("cfg").then(|| attribute.parse_args::<syn::Path>());
        matches!(condition, Some(Ok(condition)) if condition.is_ident("test"))
    };
    attributes.iter().any(test)
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

fn defined(item: &Item) -> Vec<String> {
    let name = match item {
        Item::Const(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        Item::Static(item) => &item.ident,
        Item::Struct(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::Type(item) => &item.ident,
        Item::Union(item) => &item.ident,
        Item::Macro(ItemMacro { ident: Some(name), .. }) => name,
        Item::ForeignMod(block) => {
            let function = |item: &syn::ForeignItem| match item {
                syn::ForeignItem::Fn(item) => Some(item.sig.ident.to_string()),
                syn::ForeignItem::Static(item) => Some(item.ident.to_string()),
                _ => None,
            };
            return block.items.iter().filter_map(function).collect();
        }
        _ => return Vec::new(),
    };
    vec![name.to_string()]
}
