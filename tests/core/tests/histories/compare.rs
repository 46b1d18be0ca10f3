//! Core and model must agree.

use std::collections::{BTreeMap, BTreeSet};

use harvest_fair_core_tests::harness::priority;
use harvest_fair_core_tests::model::HeldBack;
use harvest_fair_core_tests::sfq::{Ticks, Waiting};
use proptest::prelude::*;

use crate::world::World;

impl World {
    pub fn compare(&mut self) -> Result<(), TestCaseError> {
        self.model.settle(self.now);
        self.model.forget_strangers();
        let mut sched = self.board.sched();
        sched.advance(self.queue, self.now);
        sched.check().map_err(TestCaseError::fail)?;
        for tier in 1..=5 {
            let clock = i128::from(sched.clock(self.queue, priority(tier)).get());
            prop_assert_eq!(clock, self.model.clock(tier), "clock of tier {}", tier);
        }
        let mut seen = BTreeMap::new();
        let (mut behind, mut behind_groups) = (BTreeSet::new(), BTreeSet::new());
        sched.entries(self.queue, |entry| {
            let name = (entry.priority.get(), entry.key.as_str().to_string());
            // Rows that vanish behind the board's back leave their key eligible until a claim looks; if it was
            // asleep, it even joins, also while the whole queue waits.
            let awake = entry.eligible
                || entry.waiting_for.is_some()
                    && self.model.key_held_back(&name.1, self.now).is_none();
            let joined = awake && entry.pass >= entry.clock;
            if joined && !self.model.is_eligible(name.0, &name.1) {
                self.model.join_in_error(name.0, &name.1);
            }
            if entry.eligible && !self.model.is_eligible(name.0, &name.1) {
                let group = self.model.group(&name.1);
                self.doubted_groups.insert((name.0, group));
            }
            if entry.eligible && entry.pass < entry.clock {
                behind.insert(name.clone());
            }
            let group = entry.group.as_ref();
            if group.is_some_and(|group| group.pass < group.clock) {
                behind_groups.insert((name.0, self.model.group(&name.1)));
            }
            let lag = entry.lag.max(Ticks::ZERO).get();
            seen.insert(
                name,
                (
                    i128::from(lag),
                    entry.eligible,
                    entry.running,
                    entry.in_flight,
                    entry.waiting_for,
                    entry
                        .group
                        .map(|group| i128::from(group.lag.max(Ticks::ZERO).get())),
                ),
            );
        });
        let known: Vec<(u8, String)> = self
            .model
            .known()
            .map(|(tier, name)| (tier, name.to_string()))
            .collect();
        prop_assert_eq!(seen.len(), known.len());
        for (tier, name) in known {
            let (lag, eligible, running, in_flight, waiting_for, group_lag) =
                seen[&(tier, name.clone())];
            // Of a key of which rows were changed behind its back the board may believe that it is still eligible, or
            // not yet again; and of one that it keeps awake for rows that others hold it does not know when another row
            // comes due. Then the key joins, or is corrected, from another pass. Never by more than a claim's worth.
            let key = (tier, name.clone());
            if let Some(known) = self.model.lag(tier, &name)
                && known != lag
                && (self.doubted.contains(&key) || self.behind.contains(&key))
            {
                let dearest = self.dearest.get(&name).copied().unwrap_or(0);
                prop_assert!(
                    (known - lag).abs() <= dearest,
                    "{name:?}: lag {lag}, not {known}"
                );
                self.model.set_lag(tier, &name, lag);
            }
            prop_assert_eq!(
                Some(lag),
                self.model.lag(tier, &name),
                "lag of {:?} in {}",
                name,
                tier
            );
            let group = (tier, self.model.group(&name));
            if let Some(lag) = group_lag
                && let Some(known) = self.model.group_lag(tier, &name)
                && known != lag
                && (self.doubted_groups.contains(&group) || self.behind_groups.contains(&group))
            {
                let names = self.dearest.iter();
                let dearest = names.filter(|(name, _)| self.model.group(name) == group.1);
                let dearest = dearest.map(|(_, step)| *step).max().unwrap_or(0);
                prop_assert!(
                    (known - lag).abs() <= dearest,
                    "{group:?}: lag {lag}, not {known}"
                );
                self.model.set_group_lag(tier, &name, lag);
            }
            prop_assert_eq!(
                group_lag,
                self.model.group_lag(tier, &name),
                "lag of the group of {:?}",
                name
            );
            // More keys than are eligible may be thought so; never fewer.
            prop_assert!(
                eligible
                    || !self.model.is_eligible(tier, &name)
                    || self.model.held_back(&name, self.now).is_some(),
                "{:?} is missed",
                name
            );
            if self.model.has_due_row(tier, &name, self.now) {
                let expected = self.model.held_back(&name, self.now).map(|why| match why {
                    HeldBack::Paused => Waiting::Paused,
                    HeldBack::Cap => Waiting::Cap,
                    HeldBack::Rate => Waiting::Rate,
                });
                prop_assert_eq!(waiting_for, expected, "what {:?} waits for", name);
                prop_assert_eq!(eligible, expected.is_none());
            } else {
                prop_assert!(!eligible || self.model.held_back(&name, self.now).is_none());
            }
            let expected = self.model.running(&name);
            prop_assert_eq!(running as usize, expected, "running count of {:?}", name);
            let open = self.open.iter().flatten();
            let expected = open
                .filter(|(c, _)| c.priority == tier && c.key == name)
                .count();
            prop_assert_eq!(
                in_flight as usize,
                expected,
                "claims in flight of {:?}",
                name
            );
        }
        (self.behind, self.behind_groups) = (behind, behind_groups);
        Ok(())
    }
}
