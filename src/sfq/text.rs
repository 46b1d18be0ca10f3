//! The text of keys. The first bytes stand in the key's record; what is longer goes on in chunks, of which the board has
//! fewer than it would take if all keys were long.

use super::records::{CHUNK_TEXT, Chunk, KEY_IN_RECORD, Tenant};
use super::tree::NIL;
use super::{Full, Sched};
use crate::names::{FairnessKey, MAX_KEY_BYTES};

/// The most chunks of one key.
pub(super) const MOST_CHUNKS: usize = (MAX_KEY_BYTES - KEY_IN_RECORD).div_ceil(CHUNK_TEXT);

/// How many chunks a key of so many bytes takes.
pub(super) fn chunks_for(bytes: usize) -> usize {
    bytes.saturating_sub(KEY_IN_RECORD).div_ceil(CHUNK_TEXT)
}

impl Tenant {
    /// What of the key stands in the record.
    fn front(&self) -> &[u8] {
        let length = usize::from(self.key_len).min(KEY_IN_RECORD);
        self.key.get(..length).unwrap_or_default()
    }
}

impl Sched<'_> {
    /// The key of a record. One that goes on in chunks is copied.
    pub(super) fn key_text(&self, tenant: u32) -> FairnessKey<'_> {
        let record = self.tenants.get(tenant);
        let length = usize::from(record.key_len);
        if length <= KEY_IN_RECORD {
            return FairnessKey::trusted(record.front());
        }
        let mut text = Vec::with_capacity(KEY_IN_RECORD + MOST_CHUNKS * CHUNK_TEXT);
        text.extend_from_slice(record.front());
        self.each_chunk(record, |chunk| {
            text.extend_from_slice(&chunk.text);
            true
        });
        text.truncate(length);
        FairnessKey::trusted(&text).into_owned()
    }

    /// Whether this is the key of a record.
    pub(super) fn has_key(&self, tenant: &Tenant, key: &[u8]) -> bool {
        if usize::from(tenant.key_len) != key.len() {
            return false;
        }
        let (front, rest) = key.split_at(key.len().min(KEY_IN_RECORD));
        let mut parts = rest.chunks(CHUNK_TEXT);
        let mut same = tenant.front() == front;
        self.each_chunk(tenant, |chunk| {
            let part = parts.next().unwrap_or_default();
            same &= chunk.text.get(..part.len()) == Some(part);
            same
        });
        same && parts.next().is_none()
    }

    /// How many chunks a record has.
    pub(super) fn chunks_of(&self, tenant: &Tenant) -> usize {
        let mut count = 0;
        self.each_chunk(tenant, |_| {
            count += 1;
            true
        });
        count
    }

    fn each_chunk(&self, tenant: &Tenant, mut visit: impl FnMut(&Chunk) -> bool) {
        let mut at = tenant.more;
        for _ in 0..MOST_CHUNKS {
            let chunk = self.chunks.get(at);
            if at == NIL || !visit(chunk) {
                return;
            }
            at = chunk.next;
        }
    }

    /// Writes a key into a new record. Where chunks are missing, idle keys that have some are evicted; without enough of
    /// them the record is left without a key.
    pub(super) fn write_key(&mut self, tenant: u32, key: &[u8]) -> Result<(), Full> {
        if key.len() > MAX_KEY_BYTES {
            return Err(Full::Keys);
        }
        let (front, rest) = key.split_at(key.len().min(KEY_IN_RECORD));
        // From the end on, so that each chunk knows the one that follows it.
        for part in rest.chunks(CHUNK_TEXT).rev() {
            let mut slot = self.header.free_chunks.take(&mut self.chunks);
            if slot == NIL && self.evict_long_key() {
                slot = self.header.free_chunks.take(&mut self.chunks);
            }
            if slot == NIL {
                self.free_text(tenant);
                return Err(Full::Keys);
            }
            let chunk = self.chunks.get_mut(slot);
            if let Some(place) = chunk.text.get_mut(..part.len()) {
                place.copy_from_slice(part);
            }
            let record = self.tenants.get_mut(tenant);
            chunk.next = std::mem::replace(&mut record.more, slot);
        }
        let record = self.tenants.get_mut(tenant);
        if let Some(place) = record.key.get_mut(..front.len()) {
            place.copy_from_slice(front);
        }
        record.key_len = key.len() as u16;
        Ok(())
    }

    /// Gives the chunks of a record back.
    pub(super) fn free_text(&mut self, tenant: u32) {
        let mut at = std::mem::take(&mut self.tenants.get_mut(tenant).more);
        for _ in 0..MOST_CHUNKS {
            if at == NIL {
                return;
            }
            let next = self.chunks.get(at).next;
            self.header.free_chunks.give_back(&mut self.chunks, at);
            at = next;
        }
    }
}
