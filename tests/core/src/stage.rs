//! Actors that run one at a time: each is a thread that stops before everything others could see, and a seeded director
//! says who goes on. So the true claim driver runs in any interleaving, and each one can be repeated.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};

/// A small deterministic generator (xorshift64*).
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn roll(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        ((self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize) % sides.max(1)
    }

    pub fn one_in(&mut self, n: usize) -> bool {
        self.roll(n) == 0
    }

    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> Option<&'a T> {
        from.get(self.roll(from.len()))
    }
}

/// An actor's end of the line to the director.
pub struct Cue {
    go: Receiver<()>,
    stopped: Sender<()>,
}

impl Cue {
    /// Lets the director choose who is next.
    pub fn pause(&self) {
        let _ = self.stopped.send(());
        if self.go.recv().is_err() {
            // The director is gone, because another actor has failed: leave quietly.
            resume_unwind(Box::new("the performance is over"));
        }
    }
}

/// What an actor does, from its first cue to its end.
pub type Script<'s> = Box<dyn FnOnce(&Cue) + Send + 's>;

/// Runs all scripts to their ends, interleaved by `dice`, and calls `between` after every step. A panic in a script comes
/// out here.
pub fn perform(dice: &mut Dice, scripts: Vec<Script<'_>>, mut between: impl FnMut()) {
    std::thread::scope(|scope| {
        let mut cast = Vec::new();
        for script in scripts {
            let (go, cue) = channel();
            let (stopped, seen) = channel();
            let cue = Cue { go: cue, stopped };
            let actor = scope.spawn(move || {
                let _ = cue.go.recv();
                script(&cue);
            });
            cast.push((go, seen, actor));
        }
        while !cast.is_empty() {
            let chosen = dice.roll(cast.len());
            let (go, seen, _) = &cast[chosen];
            let _ = go.send(());
            if seen.recv().is_err() {
                // It has dropped its end: the script is over.
                let (.., actor) = cast.swap_remove(chosen);
                if let Err(panic) = actor.join() {
                    drop(cast);
                    resume_unwind(panic);
                }
            }
            if let Err(panic) = catch_unwind(AssertUnwindSafe(&mut between)) {
                drop(cast);
                resume_unwind(panic);
            }
        }
    });
}
