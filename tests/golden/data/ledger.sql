PRAGMA application_id = 1147752531;
PRAGMA user_version = 9;
BEGIN TRANSACTION;
CREATE TABLE audit (
    place INTEGER PRIMARY KEY, asked REAL, caller TEXT NOT NULL, action TEXT NOT NULL, arguments TEXT NOT NULL,
    outcome TEXT NOT NULL, refused INTEGER NOT NULL, passed_over INTEGER NOT NULL, wall REAL
) STRICT;
CREATE TABLE digests (
    round INTEGER NOT NULL REFERENCES versions, slave TEXT NOT NULL, digest TEXT NOT NULL, PRIMARY KEY (round, slave)
) STRICT;
INSERT INTO "digests" VALUES(1,'s','digest');
INSERT INTO "digests" VALUES(2,'s','digest');
INSERT INTO "digests" VALUES(3,'s','digest');
INSERT INTO "digests" VALUES(4,'s','digest');
INSERT INTO "digests" VALUES(5,'s','digest');
INSERT INTO "digests" VALUES(6,'s','digest');
INSERT INTO "digests" VALUES(7,'s','digest');
INSERT INTO "digests" VALUES(8,'s','digest');
CREATE TABLE durable (round INTEGER PRIMARY KEY REFERENCES versions, at REAL, wall REAL) STRICT;
CREATE TABLE finished (
    only INTEGER PRIMARY KEY CHECK (only = 1), version INTEGER NOT NULL, round INTEGER NOT NULL,
    reason TEXT NOT NULL, at REAL, wall REAL
) STRICT;
CREATE TABLE folds (
    round INTEGER NOT NULL REFERENCES versions, place INTEGER NOT NULL,
    cluster TEXT NOT NULL, inc INTEGER NOT NULL, seq INTEGER NOT NULL,
    base_version INTEGER NOT NULL, base_round INTEGER NOT NULL,
    tokens INTEGER NOT NULL, inner_steps INTEGER NOT NULL,
    weight REAL, norm REAL, score REAL, loss REAL, ranges TEXT NOT NULL,
    anchored INTEGER NOT NULL DEFAULT 0,  -- 1: folded as its difference to its base, not to the version's parent
    PRIMARY KEY (round, place),
    UNIQUE (cluster, inc, seq)  -- once: no push is in two versions (docs/architecture.md#invariant-4)
) STRICT;
INSERT INTO "folds" VALUES(1,0,'a',1,2,0,0,197,4,1.0,0.896836479,0.0,2.5,'[0, 1]',0);
INSERT INTO "folds" VALUES(1,1,'b',1,2,0,0,198,4,1.00507614,0.646855722,0.0,2.5,'[2, 3]',0);
INSERT INTO "folds" VALUES(2,0,'a',1,3,1,1,247,4,1.0,0.447614378,0.0,2.5,'[4, 5]',0);
INSERT INTO "folds" VALUES(2,1,'b',1,3,1,1,248,4,1.00404858,0.868894768,0.0,2.5,'[6, 7]',0);
INSERT INTO "folds" VALUES(3,0,'a',1,4,2,2,297,4,1.0,0.850597839,0.00165589765,2.5,'[8, 9]',0);
INSERT INTO "folds" VALUES(4,0,'a',1,5,3,3,347,4,1.0,0.802119902,0.0310956396,2.5,'[10, 11]',0);
INSERT INTO "folds" VALUES(4,1,'b',1,4,3,3,348,4,1.00288184,0.891008179,0.00250047818,2.5,'[12, 13]',0);
INSERT INTO "folds" VALUES(5,0,'a',1,6,4,4,397,4,1.0,0.454568568,-0.412527138,2.5,'[14, 15]',0);
INSERT INTO "folds" VALUES(6,0,'a',1,7,5,5,447,4,1.0,0.704414658,0.0257115617,2.5,'[18, 19]',0);
INSERT INTO "folds" VALUES(7,0,'a',1,8,6,6,497,4,1.0,0.619842754,-0.190487347,2.5,'[20, 21]',0);
INSERT INTO "folds" VALUES(7,1,'b',1,6,6,6,498,4,1.00201207,0.560412779,-0.190569468,2.5,'[22, 23]',0);
INSERT INTO "folds" VALUES(8,0,'a',1,9,7,7,547,4,1.0,0.683555085,0.0041988227,2.5,'[24, 25]',0);
INSERT INTO "folds" VALUES(8,1,'b',1,7,7,7,548,4,1.00182815,0.649949065,-0.143213524,2.5,'[26, 27]',0);
CREATE TABLE genesis (layer INTEGER PRIMARY KEY, digest TEXT NOT NULL, norm REAL) STRICT;
INSERT INTO "genesis" VALUES(0,'00000000000000000000000000000000',100.0);
CREATE TABLE incarnations (
    role TEXT NOT NULL CHECK (role IN ('cluster', 'slave')),
    name TEXT NOT NULL, inc INTEGER NOT NULL, nonce TEXT NOT NULL,
    PRIMARY KEY (role, name, inc)
) STRICT;
INSERT INTO "incarnations" VALUES('slave','s',1,'n');
INSERT INTO "incarnations" VALUES('cluster','a',1,'p');
INSERT INTO "incarnations" VALUES('cluster','b',1,'p');
CREATE TABLE incarnations_ended (
    cluster TEXT NOT NULL, inc INTEGER NOT NULL, reason TEXT NOT NULL, tokens_lost INTEGER NOT NULL, at REAL, wall REAL,
    PRIMARY KEY (cluster, inc)
) STRICT;
INSERT INTO "incarnations_ended" VALUES('b',1,'silent for 10.0 s',2762,88.0,0.0);
CREATE TABLE layer_factors (
    round INTEGER NOT NULL REFERENCES versions, place INTEGER NOT NULL, factors TEXT NOT NULL,
    PRIMARY KEY (round, place)
) STRICT;
CREATE TABLE leases (
    place INTEGER PRIMARY KEY, cluster TEXT NOT NULL, inc INTEGER NOT NULL, seq INTEGER NOT NULL, ranges TEXT NOT NULL,
    UNIQUE (cluster, inc, seq)
) STRICT;
INSERT INTO "leases" VALUES(1,'a',1,1,'[0, 1]');
INSERT INTO "leases" VALUES(2,'b',1,1,'[2, 3]');
INSERT INTO "leases" VALUES(3,'a',1,2,'[4, 5]');
INSERT INTO "leases" VALUES(4,'b',1,2,'[6, 7]');
INSERT INTO "leases" VALUES(5,'a',1,3,'[8, 9]');
INSERT INTO "leases" VALUES(6,'a',1,4,'[10, 11]');
INSERT INTO "leases" VALUES(7,'b',1,4,'[12, 13]');
INSERT INTO "leases" VALUES(8,'a',1,5,'[14, 15]');
INSERT INTO "leases" VALUES(9,'b',1,5,'[16, 17]');
INSERT INTO "leases" VALUES(10,'a',1,6,'[18, 19]');
INSERT INTO "leases" VALUES(11,'a',1,7,'[20, 21]');
INSERT INTO "leases" VALUES(12,'b',1,7,'[22, 23]');
INSERT INTO "leases" VALUES(13,'a',1,8,'[24, 25]');
INSERT INTO "leases" VALUES(14,'b',1,8,'[26, 27]');
CREATE TABLE left_open (
    cluster TEXT NOT NULL, inc INTEGER NOT NULL, seq INTEGER NOT NULL, tokens INTEGER NOT NULL,
    PRIMARY KEY (cluster, inc)
) STRICT;
CREATE TABLE outcomes (
    place INTEGER PRIMARY KEY, round INTEGER NOT NULL REFERENCES rounds,
    cluster TEXT NOT NULL, inc INTEGER NOT NULL, seq INTEGER NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('accepted', 'gated', 'skipped')),
    reason TEXT NOT NULL, tokens INTEGER NOT NULL, inner_steps INTEGER NOT NULL,
    norm REAL, score REAL, ranges TEXT NOT NULL,
    begun TEXT NOT NULL  -- [number, done, of] of the range after those, trained in part; or []
) STRICT;
INSERT INTO "outcomes" VALUES(1,1,'a',1,2,'accepted','in v1@r1: warm-up, 2 pushes left',197,4,0.896836479,0.0,'[0, 1]','[]');
INSERT INTO "outcomes" VALUES(2,1,'b',1,2,'accepted','in v1@r1: warm-up, 2 pushes left',198,4,0.646855722,0.0,'[2, 3]','[]');
INSERT INTO "outcomes" VALUES(3,2,'a',1,3,'accepted','in v2@r2: warm-up, 1 pushes left',247,4,0.447614378,0.0,'[4, 5]','[]');
INSERT INTO "outcomes" VALUES(4,2,'b',1,3,'accepted','in v2@r2: warm-up, 1 pushes left',248,4,0.868894768,0.0,'[6, 7]','[]');
INSERT INTO "outcomes" VALUES(5,3,'a',1,4,'accepted','in v3@r3: score 0.00166, at most 3',297,4,0.850597839,0.00165589765,'[8, 9]','[]');
INSERT INTO "outcomes" VALUES(6,4,'a',1,5,'accepted','in v4@r4: score 0.0311, at most 3',347,4,0.802119902,0.0310956396,'[10, 11]','[]');
INSERT INTO "outcomes" VALUES(7,4,'b',1,4,'accepted','in v4@r4: score 0.0025, at most 3',348,4,0.891008179,0.00250047818,'[12, 13]','[]');
INSERT INTO "outcomes" VALUES(8,5,'a',1,6,'accepted','in v5@r5: score -0.413, at most 3',397,4,0.454568568,-0.412527138,'[14, 15]','[]');
INSERT INTO "outcomes" VALUES(9,5,'b',1,5,'gated','norm 277.7 above the hard cap 8.023, 10 × its usual norm',398,4,277.745794,0.0,'[16, 17]','[]');
INSERT INTO "outcomes" VALUES(10,6,'a',1,7,'accepted','in v6@r6: score 0.0257, at most 3',447,4,0.704414658,0.0257115617,'[18, 19]','[]');
INSERT INTO "outcomes" VALUES(11,7,'a',1,8,'accepted','in v7@r7: score -0.19, at most 3',497,4,0.619842754,-0.190487347,'[20, 21]','[]');
INSERT INTO "outcomes" VALUES(12,7,'b',1,6,'accepted','in v7@r7: score -0.191, at most 3',498,4,0.560412779,-0.190569468,'[22, 23]','[]');
INSERT INTO "outcomes" VALUES(13,8,'a',1,9,'accepted','in v8@r8: score 0.0042, at most 3',547,4,0.683555085,0.0041988227,'[24, 25]','[]');
INSERT INTO "outcomes" VALUES(14,8,'b',1,7,'accepted','in v8@r8: score -0.143, at most 3',548,4,0.649949065,-0.143213524,'[26, 27]','[]');
CREATE TABLE penalty (
    place INTEGER PRIMARY KEY, round INTEGER NOT NULL,
    cluster TEXT NOT NULL, n INTEGER NOT NULL, mu REAL, sigma REAL, last_norm REAL,
    warm_left INTEGER NOT NULL, gated_in_a_row INTEGER NOT NULL, quarantined INTEGER NOT NULL,
    accepted INTEGER NOT NULL, reference REAL, steps REAL, broken INTEGER NOT NULL,
    loss REAL, loss_shift REAL, suspicion REAL NOT NULL DEFAULT 0,
    layers TEXT NOT NULL DEFAULT '[]'  -- [n, mu, sigma, left out in a row] of each
) STRICT;
INSERT INTO "penalty" VALUES(1,1,'a',1,0.896836479,0.0,0.896836479,1,0,0,1,0.896836479,4.0,0,NULL,0.0,0.0,'[]');
INSERT INTO "penalty" VALUES(2,1,'b',1,0.646855722,0.0,0.646855722,1,0,0,1,0.646855722,4.0,0,NULL,0.0,0.0,'[]');
INSERT INTO "penalty" VALUES(3,2,'a',2,0.672225428,0.0317647994,0.447614378,0,0,0,2,0.672225428,4.0,0,NULL,0.0,0.0,'[]');
INSERT INTO "penalty" VALUES(4,2,'b',2,0.757875245,0.0157005316,0.868894768,0,0,0,2,0.757875245,4.0,0,NULL,0.0,0.0,'[]');
INSERT INTO "penalty" VALUES(5,3,'a',3,0.731682899,0.0356600294,0.850597839,0,0,0,3,0.731682899,4.0,0,NULL,0.0,0.0,'[]');
INSERT INTO "penalty" VALUES(6,4,'a',4,0.749292149,0.0360835194,0.802119902,0,0,0,4,0.749292149,4.0,0,NULL,0.0,0.0,'[]');
INSERT INTO "penalty" VALUES(7,4,'b',3,0.80225289,0.0199781527,0.891008179,0,0,0,3,0.80225289,4.0,0,NULL,0.0,0.0,'[]');
INSERT INTO "penalty" VALUES(8,5,'a',5,0.690347433,0.0488652579,0.454568568,0,0,0,5,0.690347433,4.0,0,NULL,0.0,0.0,'[]');
INSERT INTO "penalty" VALUES(9,5,'b',3,0.80225289,0.0199781527,0.891008179,0,1,0,3,0.80225289,4.0,0,NULL,0.0,0.0,'[]');
INSERT INTO "penalty" VALUES(10,6,'a',6,0.692691971,0.048402537,0.704414658,0,0,0,6,0.692691971,4.0,0,NULL,0.0,0.0,'[]');
INSERT INTO "penalty" VALUES(11,7,'a',7,0.68228494,0.0487229926,0.619842754,0,0,0,7,0.68228494,4.0,0,NULL,0.0,0.0,'[]');
INSERT INTO "penalty" VALUES(12,7,'b',4,0.741792862,0.0323901026,0.560412779,0,0,0,4,0.741792862,4.0,0,NULL,0.0,0.0,'[]');
INSERT INTO "penalty" VALUES(13,8,'a',8,0.682443708,0.0482335579,0.683555085,0,0,0,8,0.682443708,4.0,0,NULL,0.0,0.0,'[]');
INSERT INTO "penalty" VALUES(14,8,'b',5,0.723424102,0.0337062011,0.649949065,0,0,0,5,0.723424102,4.0,0,NULL,0.0,0.0,'[]');
CREATE TABLE placement (place INTEGER PRIMARY KEY, slave TEXT NOT NULL UNIQUE, layers TEXT NOT NULL) STRICT;
INSERT INTO "placement" VALUES(0,'s','[0]');
CREATE TABLE quarantines (
    place INTEGER PRIMARY KEY, cluster TEXT NOT NULL, reason TEXT NOT NULL, last_round INTEGER NOT NULL, at REAL,
    wall REAL
) STRICT;
CREATE TABLE rebalanced (
    rebalance INTEGER NOT NULL REFERENCES rebalances, place INTEGER NOT NULL,
    slave TEXT NOT NULL, layers TEXT NOT NULL, digest TEXT,
    PRIMARY KEY (rebalance, place), UNIQUE (rebalance, slave)
) STRICT;
CREATE TABLE rebalances (
    place INTEGER PRIMARY KEY, round INTEGER NOT NULL REFERENCES versions, last_round INTEGER NOT NULL, wall REAL
) STRICT;
CREATE TABLE recoveries (
    round INTEGER PRIMARY KEY REFERENCES versions, source TEXT NOT NULL, layers TEXT NOT NULL, wall REAL
) STRICT;
CREATE TABLE restores (
    place INTEGER PRIMARY KEY, source TEXT NOT NULL, unknown_from INTEGER NOT NULL, known_again INTEGER NOT NULL,
    incarnations_above INTEGER NOT NULL, wall REAL
) STRICT;
CREATE TABLE retired (round INTEGER PRIMARY KEY REFERENCES versions) STRICT;
INSERT INTO "retired" VALUES(1);
INSERT INTO "retired" VALUES(2);
INSERT INTO "retired" VALUES(3);
INSERT INTO "retired" VALUES(4);
INSERT INTO "retired" VALUES(5);
INSERT INTO "retired" VALUES(6);
CREATE TABLE rollbacks (
    place INTEGER PRIMARY KEY, head_version INTEGER NOT NULL, head_round INTEGER NOT NULL,
    reason TEXT NOT NULL, at REAL, wall REAL
) STRICT;
CREATE TABLE round_ends (
    round INTEGER PRIMARY KEY REFERENCES rounds,
    kind TEXT NOT NULL CHECK (kind IN ('applied', 'skipped', 'unchanged')),
    reason TEXT NOT NULL, at REAL, wall REAL
) STRICT;
INSERT INTO "round_ends" VALUES(1,'applied','',0.0,0.0);
INSERT INTO "round_ends" VALUES(2,'applied','',11.0,0.0);
INSERT INTO "round_ends" VALUES(3,'applied','',33.0,0.0);
INSERT INTO "round_ends" VALUES(4,'applied','',33.0,0.0);
INSERT INTO "round_ends" VALUES(5,'applied','',44.0,0.0);
INSERT INTO "round_ends" VALUES(6,'applied','',66.0,0.0);
INSERT INTO "round_ends" VALUES(7,'applied','',66.0,0.0);
INSERT INTO "round_ends" VALUES(8,'applied','',77.0,0.0);
CREATE TABLE rounds (round INTEGER PRIMARY KEY, at REAL, wall REAL) STRICT;
INSERT INTO "rounds" VALUES(1,0.0,0.0);
INSERT INTO "rounds" VALUES(2,11.0,0.0);
INSERT INTO "rounds" VALUES(3,22.0,0.0);
INSERT INTO "rounds" VALUES(4,33.0,0.0);
INSERT INTO "rounds" VALUES(5,44.0,0.0);
INSERT INTO "rounds" VALUES(6,55.0,0.0);
INSERT INTO "rounds" VALUES(7,66.0,0.0);
INSERT INTO "rounds" VALUES(8,77.0,0.0);
CREATE TABLE run (
    only INTEGER PRIMARY KEY CHECK (only = 1),
    run TEXT NOT NULL, config_digest TEXT NOT NULL, manifest TEXT NOT NULL
) STRICT;
INSERT INTO "run" VALUES(1,'golden','c0ff1e','{"format":1,"layers":[{"name":"l","parameters":[["l.w",[1000]]]}]}');
CREATE TABLE score_history (
    only INTEGER PRIMARY KEY CHECK (only = 1), scores TEXT NOT NULL, delta_norms TEXT NOT NULL,
    layer_norms TEXT NOT NULL DEFAULT '[]', digests TEXT NOT NULL DEFAULT '[]'
) STRICT;
INSERT INTO "score_history" VALUES(1,'[0.0, 0.0, 0.00165589765, 0.0310956396, -0.412527138, 0.0257115617, -0.190487347, 0.0041988227]','[1.37749791, 1.11283097, 1.70119568, 1.48005776, 0.909137136, 1.40882932, 0.647905815, 0.737203803]','[]','[]');
CREATE TABLE targets (
    place INTEGER PRIMARY KEY, tokens INTEGER NOT NULL, versions INTEGER NOT NULL, wall_s REAL NOT NULL,
    epochs INTEGER NOT NULL, resumed TEXT NOT NULL, last_round INTEGER NOT NULL, at REAL, wall REAL
) STRICT;
CREATE TABLE terms (term INTEGER PRIMARY KEY, wall REAL) STRICT;
INSERT INTO "terms" VALUES(1,0.0);
CREATE TABLE tunings (
    place INTEGER PRIMARY KEY, key TEXT NOT NULL, value REAL, last_round INTEGER NOT NULL, at REAL, wall REAL
) STRICT;
CREATE TABLE undone (
    round INTEGER PRIMARY KEY REFERENCES versions, rollback INTEGER NOT NULL REFERENCES rollbacks
) STRICT;
CREATE TABLE version_results (
    round INTEGER PRIMARY KEY REFERENCES versions, ok INTEGER NOT NULL, reason TEXT NOT NULL, numbers TEXT NOT NULL,
    seconds REAL, wall REAL
) STRICT;
CREATE TABLE versions (
    round INTEGER PRIMARY KEY, version INTEGER NOT NULL,
    parent_version INTEGER NOT NULL, parent_round INTEGER NOT NULL,
    durable INTEGER NOT NULL, tokens INTEGER NOT NULL,
    scale REAL, lr REAL, a REAL, delta_norm REAL, clipped INTEGER NOT NULL, b REAL, c REAL, e REAL, returned REAL
) STRICT;
INSERT INTO "versions" VALUES(0,0,0,0,1,0,0.0,0.0,0.0,0.0,0,0.0,0.0,0.0,0.0);
INSERT INTO "versions" VALUES(1,1,0,0,1,395,0.498734177,0.7,0.8,1.37749791,0,1.0,1.0,0.8,0.446428571);
INSERT INTO "versions" VALUES(2,2,1,1,1,495,0.498989899,0.7,0.8,1.11283097,0,1.0,1.0,0.8,0.446428571);
INSERT INTO "versions" VALUES(3,3,2,2,1,297,0.739254219,0.7,0.8,1.70119568,1,1.0,1.0,0.8,0.446428571);
INSERT INTO "versions" VALUES(4,4,3,3,1,695,0.469330015,0.7,0.8,1.48005776,1,1.0,1.0,0.8,0.446428571);
INSERT INTO "versions" VALUES(5,5,4,4,1,397,1.0,0.7,0.8,0.909137136,0,1.0,1.0,0.8,0.446428571);
INSERT INTO "versions" VALUES(6,6,5,5,1,447,0.987538286,0.7,0.8,1.40882932,1,1.0,1.0,0.8,0.446428571);
INSERT INTO "versions" VALUES(7,7,6,6,1,995,0.499497487,0.7,0.8,0.647905815,0,1.0,1.0,0.8,0.446428571);
INSERT INTO "versions" VALUES(8,8,7,7,1,1095,0.499543379,0.7,0.8,0.737203803,0,1.0,1.0,0.8,0.446428571);
CREATE INDEX outcomes_by_cluster ON outcomes (cluster, place);
CREATE INDEX penalty_by_cluster ON penalty (cluster, place);
COMMIT;
