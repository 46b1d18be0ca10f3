//! The byte region seen as records. This is the only file of the core with `unsafe` in it: it turns bytes into slices
//! of plain records, once per attach. Everything after that is ordinary safe Rust over slices and slot numbers.

use std::mem::{align_of, size_of};

use super::bucket::Bucket;
use super::lane::Lane;
use super::node::{Member, Members};
use super::policy::PolicyRec;
use super::records::{BANDS, ByWake, Chunk, Entry, FreeSlots, Header, QueueRec, Tenant};
use super::text::MOST_CHUNKS;
use super::tree::{Links, NIL, Nodes};
use super::{Error, Sched};

/// Written into a region when it is set up; changes with the layout of the records.
const MAGIC: u64 = u64::from_le_bytes(*b"hfboard4");

/// Marks types whose every bit pattern, all-zero included, is a valid value.
///
/// # Safety
/// The type is `repr(C)` or primitive, and consists of integers, floats and arrays and structs of such only.
pub unsafe trait Record: Copy {
    // SAFETY: the trait promises that all-zero bytes are a valid value.
    const ZERO: Self = unsafe { std::mem::zeroed() };
}

// SAFETY: a primitive integer.
unsafe impl Record for u32 {}
// SAFETY: `repr(C)`, integers and structs of integers only.
unsafe impl Record for Header {}
// SAFETY: `repr(C)`, integers, floats, byte arrays and structs of such only.
unsafe impl Record for QueueRec {}
// SAFETY: `repr(C)`, integers, floats, structs of such and a byte array only.
unsafe impl Record for Tenant {}
// SAFETY: `repr(C)`, integers, floats and structs of such only.
unsafe impl Record for Entry {}
// SAFETY: `repr(C)`, a byte array and an integer only.
unsafe impl Record for Chunk {}

/// Splits `count` records off the front of `rest`.
fn carve<'a, T: Record>(rest: &mut &'a mut [u8], count: usize) -> Result<&'a mut [T], Error> {
    let bytes = count.checked_mul(size_of::<T>()).ok_or(Error::TooSmall)?;
    let all = std::mem::take(rest);
    if all.len() < bytes {
        return Err(Error::TooSmall);
    }
    let (front, back) = all.split_at_mut(bytes);
    *rest = back;
    if front.as_ptr().align_offset(align_of::<T>()) != 0 {
        return Err(Error::Misaligned);
    }
    // SAFETY: `front` is an exclusive borrow, for 'a, of exactly `count * size_of::<T>()` initialised bytes, aligned
    // for T as just checked; `T: Record` says that any bytes are a valid T; the result takes over the borrow.
    Ok(unsafe { std::slice::from_raw_parts_mut(front.as_mut_ptr().cast::<T>(), count) })
}

/// Fixed-capacity records addressed by slot number, from 1. Access is total: slot [`NIL`], or a slot that does not
/// exist, is a record of its own that stands for nothing, so that no slot number can make the core panic.
pub struct Pool<'a, T> {
    nothing: &'a mut T,
    records: &'a mut [T],
}

impl<'a, T: Record> Pool<'a, T> {
    fn carve(rest: &mut &'a mut [u8], capacity: usize) -> Result<Self, Error> {
        let all = carve::<T>(rest, capacity.saturating_add(1))?;
        let (nothing, records) = all.split_first_mut().ok_or(Error::TooSmall)?;
        Ok(Pool { nothing, records })
    }
}

impl<T> Pool<'_, T> {
    pub fn get(&self, slot: u32) -> &T {
        self.records
            .get((slot as usize).wrapping_sub(1))
            .unwrap_or(self.nothing)
    }

    pub fn get_mut(&mut self, slot: u32) -> &mut T {
        match self.records.get_mut((slot as usize).wrapping_sub(1)) {
            Some(record) => record,
            None => self.nothing,
        }
    }

    pub fn capacity(&self) -> u32 {
        self.records.len() as u32
    }

    /// Makes every record an unused one.
    pub fn clear(&mut self)
    where
        T: Record,
    {
        *self.nothing = T::ZERO;
        self.records.fill(T::ZERO);
    }

    /// Copies the records of another pool that have ever been in use, according to `free`; as many as there is room for.
    pub fn copy_from(&mut self, other: &Pool<'_, T>, free: &FreeSlots)
    where
        T: Copy,
    {
        *self.nothing = *other.nothing;
        let used = free.used_so_far as usize;
        for (to, from) in self.records.iter_mut().zip(&*other.records).take(used) {
            *to = *from;
        }
    }

    /// All slots that have ever been in use, according to `free`.
    pub fn slots(&self, free: &FreeSlots) -> std::ops::RangeInclusive<u32> {
        1..=free.used_so_far.min(self.capacity())
    }
}

/// A record that can be handed out and returned.
pub trait Slot: Copy {
    /// A new record.
    const NEW: Self;
    /// The link that chains returned slots.
    fn next_free(&mut self) -> &mut u32;
}

impl FreeSlots {
    /// Hands out a slot with a new record in it, or [`NIL`].
    pub fn take<T: Slot>(&mut self, pool: &mut Pool<'_, T>) -> u32 {
        let slot = if self.returned != NIL {
            let slot = self.returned;
            self.returned = *pool.get_mut(slot).next_free();
            slot
        } else if self.used_so_far < pool.capacity() {
            self.used_so_far += 1;
            self.used_so_far
        } else {
            return NIL;
        };
        self.in_use += 1;
        *pool.get_mut(slot) = T::NEW;
        slot
    }

    pub fn give_back<T: Slot>(&mut self, pool: &mut Pool<'_, T>, slot: u32) {
        let record = pool.get_mut(slot);
        *record = T::NEW;
        *record.next_free() = self.returned;
        self.returned = slot;
        self.in_use = self.in_use.saturating_sub(1);
    }
}

impl Members for Pool<'_, Entry> {
    fn member(&self, slot: u32) -> &Member {
        &self.get(slot).member
    }

    fn member_mut(&mut self, slot: u32) -> &mut Member {
        &mut self.get_mut(slot).member
    }
}

impl Nodes<ByWake> for Pool<'_, Entry> {
    type Key = i64;

    fn key(&self, slot: u32) -> i64 {
        self.get(slot).wake
    }

    fn links(&self, slot: u32) -> &Links {
        &self.get(slot).timer
    }

    fn links_mut(&mut self, slot: u32) -> &mut Links {
        &mut self.get_mut(slot).timer
    }
}

impl Slot for QueueRec {
    const NEW: QueueRec = QueueRec {
        policy: PolicyRec::DEFAULT,
        bucket: Bucket::FULL,
        latest: i64::MIN,
        lease_due: i64::MAX,
        unpin_due: i64::MAX,
        ..QueueRec::ZERO
    };

    fn next_free(&mut self) -> &mut u32 {
        &mut self.chain
    }
}

impl Slot for Tenant {
    const NEW: Tenant = Tenant {
        weight: f64::NAN,
        bucket: Bucket::FULL,
        average: f32::NAN,
        own_weight: f32::NAN,
        ..Tenant::ZERO
    };

    fn next_free(&mut self) -> &mut u32 {
        &mut self.chain
    }
}

impl Slot for Entry {
    const NEW: Entry = Entry {
        wake: i64::MAX,
        lanes: [Lane::CLOSED; BANDS],
        ..Entry::ZERO
    };

    fn next_free(&mut self) -> &mut u32 {
        &mut self.siblings.next
    }
}

impl Slot for Chunk {
    const NEW: Chunk = Chunk::ZERO;

    fn next_free(&mut self) -> &mut u32 {
        &mut self.next
    }
}

/// How many records of each kind a region holds.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub queues: u32,
    pub keys: u32,
    /// Room for what keys are longer than their records.
    pub chunks: u32,
}

impl Shape {
    /// Room for the longest keys in one of eight records.
    pub fn new(queues: u32, keys: u32) -> Shape {
        let chunks = keys / CHUNK_SHARE.1 * CHUNK_SHARE.0;
        Shape {
            queues,
            keys,
            chunks: chunks.max(MOST_CHUNKS as u32),
        }
    }

    /// Room for any keys.
    pub fn roomy(queues: u32, keys: u32) -> Shape {
        Shape {
            queues,
            keys,
            chunks: keys.saturating_mul(MOST_CHUNKS as u32),
        }
    }

    fn of(header: &Header) -> Shape {
        Shape {
            queues: header.max_queues,
            keys: header.max_keys,
            chunks: header.max_chunks,
        }
    }
}

/// Heads of hash chains come in pairs, to keep what follows aligned to 8 bytes.
fn heads(records: u32) -> usize {
    (records.max(1) as usize).saturating_add(1) & !1
}

/// Bytes of a region of this shape.
pub fn bytes_needed(shape: Shape) -> usize {
    let times = |count: usize, size: usize| count.saturating_mul(size);
    let slots = |count: u32| (count as usize).saturating_add(1);
    [
        size_of::<Header>(),
        times(slots(shape.queues), size_of::<QueueRec>()),
        times(slots(shape.keys), size_of::<Tenant>()),
        times(slots(shape.keys), size_of::<Entry>()),
        times(slots(shape.chunks), size_of::<Chunk>()),
        times(heads(shape.queues), size_of::<u32>()),
        times(heads(shape.keys), size_of::<u32>()),
    ]
    .into_iter()
    .fold(0, usize::saturating_add)
}

/// Chunks, for so many keys.
const CHUNK_SHARE: (u32, u32) = (3, 8);

/// What one more key costs, its part of the chunks included.
pub const BYTES_PER_KEY: usize = size_of::<Tenant>()
    + size_of::<Entry>()
    + size_of::<Chunk>() * CHUNK_SHARE.0 as usize / CHUNK_SHARE.1 as usize
    + size_of::<u32>();
const _: () = assert!(BYTES_PER_KEY <= 512);

/// Sets a region up: zeroes, then the header.
pub fn init(region: &mut [u8], shape: Shape, seed: u64) -> Result<(), Error> {
    if region.len() < bytes_needed(shape) {
        return Err(Error::TooSmall);
    }
    region.fill(0);
    let mut rest = region;
    let header = carve::<Header>(&mut rest, 1)?
        .first_mut()
        .ok_or(Error::TooSmall)?;
    *header = Header {
        magic: MAGIC,
        seed,
        max_queues: shape.queues,
        max_keys: shape.keys,
        max_chunks: shape.chunks,
        ..Header::ZERO
    };
    Ok(())
}

/// The header of an empty region as large as that of `header`.
pub fn empty_header(header: &Header) -> Header {
    let Header {
        magic,
        seed,
        max_queues,
        max_keys,
        max_chunks,
        ..
    } = *header;
    Header {
        magic,
        seed,
        max_queues,
        max_keys,
        max_chunks,
        ..Header::ZERO
    }
}

/// Looks at a region that [`init`] has set up.
pub fn attach(region: &mut [u8]) -> Result<Sched<'_>, Error> {
    let mut rest = region;
    let header = carve::<Header>(&mut rest, 1)?
        .first_mut()
        .ok_or(Error::TooSmall)?;
    if header.magic != MAGIC {
        return Err(Error::NotInitialised);
    }
    let shape = Shape::of(header);
    Ok(Sched {
        header,
        queues: Pool::carve(&mut rest, shape.queues as usize)?,
        tenants: Pool::carve(&mut rest, shape.keys as usize)?,
        entries: Pool::carve(&mut rest, shape.keys as usize)?,
        chunks: Pool::carve(&mut rest, shape.chunks as usize)?,
        queue_heads: carve(&mut rest, heads(shape.queues))?,
        tenant_heads: carve(&mut rest, heads(shape.keys))?,
    })
}
