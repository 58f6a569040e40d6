//! Which watch is which directory. A directory knows its name and the one it is in, so that a rename changes one entry
//! and not the paths of all below.

use std::collections::HashMap;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

#[derive(Debug)]
struct Node {
    parent: i32,
    name: Vec<u8>,
}

/// The watched directories.
#[derive(Debug)]
pub(super) struct Nodes {
    root: i32,
    nodes: HashMap<i32, Node>,
    by_name: HashMap<(i32, Vec<u8>), i32>,
}

impl Nodes {
    pub(super) fn new(root: i32) -> Self {
        Self { root, nodes: HashMap::new(), by_name: HashMap::new() }
    }

    pub(super) fn root(&self) -> i32 {
        self.root
    }

    pub(super) fn len(&self) -> usize {
        self.nodes.len() + 1
    }

    pub(super) fn contains(&self, wd: i32) -> bool {
        wd == self.root || self.nodes.contains_key(&wd)
    }

    pub(super) fn watches(&self) -> impl Iterator<Item = i32> + '_ {
        self.nodes.keys().copied()
    }

    /// Notes a directory; false when its watch is known already (it then takes the new place).
    pub(super) fn insert(&mut self, wd: i32, parent: i32, name: &[u8]) -> bool {
        if wd == self.root {
            return false;
        }
        let new = self.take(wd).is_none();
        self.by_name.insert((parent, name.to_vec()), wd);
        self.nodes.insert(wd, Node { parent, name: name.to_vec() });
        new
    }

    /// Takes a directory out of its place.
    fn take(&mut self, wd: i32) -> Option<Node> {
        let node = self.nodes.remove(&wd)?;
        let key = (node.parent, node.name);
        // The name may be another directory's by now.
        if self.by_name.get(&key) == Some(&wd) {
            self.by_name.remove(&key);
        }
        Some(Node { parent: key.0, name: key.1 })
    }

    pub(super) fn remove(&mut self, wd: i32) {
        self.take(wd);
    }

    /// Moves a directory; false when it is not known.
    pub(super) fn rename(&mut self, from: (i32, &[u8]), to: (i32, &[u8])) -> bool {
        match self.by_name.get(&(from.0, from.1.to_vec())).copied() {
            Some(wd) => {
                self.insert(wd, to.0, to.1);
                true
            }
            None => false,
        }
    }

    /// Forgets a directory and all below it; gives their watches.
    pub(super) fn remove_below(&mut self, parent: i32, name: &[u8]) -> Vec<i32> {
        let Some(top) = self.by_name.get(&(parent, name.to_vec())).copied() else { return Vec::new() };
        let mut found = vec![top];
        let mut at = 0;
        while at < found.len() {
            let above = found[at];
            found.extend(self.nodes.iter().filter(|(_, n)| n.parent == above).map(|(wd, _)| *wd));
            at += 1;
        }
        for wd in &found {
            self.take(*wd);
        }
        found
    }

    /// Where a directory is; `None` when it is not watched (any more).
    pub(super) fn path(&self, wd: i32, root: &Path) -> Option<PathBuf> {
        let mut names = Vec::new();
        let mut at = wd;
        while at != self.root {
            let node = self.nodes.get(&at)?;
            names.push(node.name.as_slice());
            // Names that lead in a circle lead nowhere.
            if names.len() > self.nodes.len() {
                return None;
            }
            at = node.parent;
        }
        let mut path = root.to_owned();
        path.extend(names.into_iter().rev().map(std::ffi::OsStr::from_bytes));
        Some(path)
    }
}
