//! Lists of entries: what is linked in their records.

use super::arena::Pool;
use super::records::{Entry, List};
use super::tree::NIL;

/// Which of an entry's links a list runs through.
pub trait Chain {
    fn prev(entry: &mut Entry) -> &mut u32;
    fn next(entry: &mut Entry) -> &mut u32;
}

/// The entries of one queue.
pub struct OfQueue;

impl Chain for OfQueue {
    fn prev(entry: &mut Entry) -> &mut u32 {
        &mut entry.siblings.prev
    }

    fn next(entry: &mut Entry) -> &mut u32 {
        &mut entry.siblings.next
    }
}

/// The idle entries of all queues. They do not sleep, so the list runs through the links of the timers.
pub struct Idle;

impl Chain for Idle {
    fn prev(entry: &mut Entry) -> &mut u32 {
        &mut entry.timer.left
    }

    fn next(entry: &mut Entry) -> &mut u32 {
        &mut entry.timer.right
    }
}

impl List {
    pub fn push_front<C: Chain>(&mut self, entries: &mut Pool<'_, Entry>, slot: u32) {
        self.link::<C>(entries, NIL, slot, self.first);
    }

    pub fn push_back<C: Chain>(&mut self, entries: &mut Pool<'_, Entry>, slot: u32) {
        self.link::<C>(entries, self.last, slot, NIL);
    }

    fn link<C: Chain>(&mut self, entries: &mut Pool<'_, Entry>, prev: u32, slot: u32, next: u32) {
        let entry = entries.get_mut(slot);
        *C::prev(entry) = prev;
        *C::next(entry) = next;
        self.join::<C>(entries, prev, slot);
        self.join::<C>(entries, slot, next);
    }

    pub fn remove<C: Chain>(&mut self, entries: &mut Pool<'_, Entry>, slot: u32) {
        let entry = entries.get_mut(slot);
        let prev = std::mem::take(C::prev(entry));
        let next = std::mem::take(C::next(entry));
        self.join::<C>(entries, prev, next);
    }

    /// Makes two records neighbours; NIL stands for the end of the list.
    fn join<C: Chain>(&mut self, entries: &mut Pool<'_, Entry>, prev: u32, next: u32) {
        match prev {
            NIL => self.first = next,
            _ => *C::next(entries.get_mut(prev)) = next,
        }
        match next {
            NIL => self.last = prev,
            _ => *C::prev(entries.get_mut(next)) = prev,
        }
    }
}
