//! An ordered set whose links stand inside the records it orders, so that a record is found, moved and removed by
//! its slot in O(log n) without a byte allocated.
//!
//! It is a treap: ordered by key, balanced by a hash of the slot number. Slots are handed out by arrival and the
//! hash knows nothing of keys, so no workload can steer it out of balance.

use std::marker::PhantomData;

/// "No record": slot 0 of every pool is never handed out.
pub const NIL: u32 = 0;

/// A record's place in one tree.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Links {
    pub left: u32,
    pub right: u32,
    pub parent: u32,
}

/// The records that a [`Tree`] orders. A record can stand in several trees; `By` tells their orders apart.
pub trait Nodes<By> {
    type Key: Ord + Copy;
    /// What orders the record. Must not change while the record is in the tree.
    fn key(&self, slot: u32) -> Self::Key;
    fn links(&self, slot: u32) -> &Links;
    fn links_mut(&mut self, slot: u32) -> &mut Links;
    /// Brings what a new leaf keeps of its subtree up to date. A record may keep the minimum of something over its
    /// subtree; these four keep it right, and say whether it has changed.
    fn begin(&mut self, _leaf: u32) {}
    /// A record was added to the subtree of a child.
    fn absorb(&mut self, _slot: u32, _child: u32) -> bool {
        false
    }
    /// A record was removed from its subtree.
    fn summarise(&mut self, _slot: u32) -> bool {
        false
    }
    /// `up` has taken the place of `down`, which has become its child.
    fn rotated(&mut self, _up: u32, _down: u32) {}
}

/// The root and the size; everything else stands in the records.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Tree<By> {
    root: u32,
    len: u32,
    order: PhantomData<By>,
}

impl<By> Tree<By> {
    pub fn len(&self) -> u32 {
        self.len
    }

    pub fn from_parts(root: u32, len: u32) -> Self {
        Tree {
            root,
            len,
            order: PhantomData,
        }
    }

    pub fn root(&self) -> u32 {
        self.root
    }

    pub fn is_empty(&self) -> bool {
        self.root == NIL
    }

    /// Adds a record that is not in the tree. Equal keys are ordered by slot.
    pub fn insert<N: Nodes<By>>(&mut self, nodes: &mut N, slot: u32) {
        *nodes.links_mut(slot) = Links::default();
        nodes.begin(slot);
        self.len += 1;
        if self.root == NIL {
            self.root = slot;
            return;
        }
        let key = (nodes.key(slot), slot);
        let mut at = self.root;
        loop {
            let before = key < (nodes.key(at), at);
            let links = nodes.links_mut(at);
            let child = if before {
                &mut links.left
            } else {
                &mut links.right
            };
            if *child == NIL {
                *child = slot;
                nodes.links_mut(slot).parent = at;
                break;
            }
            at = *child;
        }
        let (mut child, mut at) = (slot, nodes.links(slot).parent);
        while at != NIL && nodes.absorb(at, child) {
            child = at;
            at = nodes.links(at).parent;
        }
        loop {
            let parent = nodes.links(slot).parent;
            if parent == NIL || !outranks(slot, parent) {
                break;
            }
            self.rotate_up(nodes, slot);
        }
    }

    /// Takes out a record that is in the tree.
    pub fn remove<N: Nodes<By>>(&mut self, nodes: &mut N, slot: u32) {
        loop {
            let Links {
                left,
                right,
                parent,
            } = *nodes.links(slot);
            if left != NIL && right != NIL {
                self.rotate_up(nodes, if outranks(left, right) { left } else { right });
                continue;
            }
            let child = if left != NIL { left } else { right };
            self.replace_child(nodes, parent, slot, child);
            if child != NIL {
                nodes.links_mut(child).parent = parent;
            }
            Self::summarise_up(nodes, parent);
            break;
        }
        *nodes.links_mut(slot) = Links::default();
        self.len -= 1;
    }

    /// The record with the smallest key, or [`NIL`].
    pub fn first<N: Nodes<By>>(&self, nodes: &N) -> u32 {
        let mut at = self.root;
        while at != NIL && nodes.links(at).left != NIL {
            at = nodes.links(at).left;
        }
        at
    }

    /// The record after `slot`, or [`NIL`].
    pub fn next<N: Nodes<By>>(&self, nodes: &N, slot: u32) -> u32 {
        let mut at = nodes.links(slot).right;
        if at != NIL {
            while nodes.links(at).left != NIL {
                at = nodes.links(at).left;
            }
            return at;
        }
        let mut child = slot;
        at = nodes.links(slot).parent;
        while at != NIL && nodes.links(at).right == child {
            child = at;
            at = nodes.links(at).parent;
        }
        at
    }

    /// Every invariant of the structure, for tests.
    pub fn check<N: Nodes<By>>(&self, nodes: &N) -> Result<(), String> {
        let (mut seen, mut at, mut last) = (0, self.first(nodes), None);
        while at != NIL {
            let links = *nodes.links(at);
            for child in [links.left, links.right] {
                if child != NIL && (nodes.links(child).parent != at || outranks(child, at)) {
                    return Err(format!("slot {child} stands wrongly under {at}"));
                }
            }
            if links.parent == NIL && self.root != at {
                return Err(format!("slot {at} has no parent but is not the root"));
            }
            let key = (nodes.key(at), at);
            if last.is_some_and(|last| last >= key) {
                return Err(format!("slot {at} is out of order"));
            }
            last = Some(key);
            seen += 1;
            if seen > self.len {
                break;
            }
            at = self.next(nodes, at);
        }
        if seen != self.len {
            return Err(format!("{seen} records reached, {} counted", self.len));
        }
        Ok(())
    }

    /// A record was removed from the subtree of `slot`.
    fn summarise_up<N: Nodes<By>>(nodes: &mut N, slot: u32) {
        let mut at = slot;
        while at != NIL && nodes.summarise(at) {
            at = nodes.links(at).parent;
        }
    }

    fn rotate_up<N: Nodes<By>>(&mut self, nodes: &mut N, slot: u32) {
        let parent = nodes.links(slot).parent;
        let grandparent = nodes.links(parent).parent;
        let moved = if nodes.links(parent).left == slot {
            let moved = nodes.links(slot).right;
            nodes.links_mut(slot).right = parent;
            nodes.links_mut(parent).left = moved;
            moved
        } else {
            let moved = nodes.links(slot).left;
            nodes.links_mut(slot).left = parent;
            nodes.links_mut(parent).right = moved;
            moved
        };
        if moved != NIL {
            nodes.links_mut(moved).parent = parent;
        }
        nodes.links_mut(parent).parent = slot;
        nodes.links_mut(slot).parent = grandparent;
        self.replace_child(nodes, grandparent, parent, slot);
        nodes.rotated(slot, parent);
    }

    fn replace_child<N: Nodes<By>>(&mut self, nodes: &mut N, parent: u32, old: u32, new: u32) {
        if parent == NIL {
            self.root = new;
        } else {
            let links = nodes.links_mut(parent);
            if links.left == old {
                links.left = new;
            } else {
                links.right = new;
            }
        }
    }
}

/// Which of two slots stands nearer the root.
fn outranks(a: u32, b: u32) -> bool {
    (scatter(a), a) > (scatter(b), b)
}

/// A bijection of u32 that leaves no pattern of neighbouring slots (the finaliser of MurmurHash3).
fn scatter(slot: u32) -> u32 {
    let mut hash = slot;
    hash ^= hash >> 16;
    hash = hash.wrapping_mul(0x85eb_ca6b);
    hash ^= hash >> 13;
    hash = hash.wrapping_mul(0xc2b2_ae35);
    hash ^ (hash >> 16)
}
