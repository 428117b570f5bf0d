#pragma once
// What a kernel has of the driver's interface: a tensor map, which its host has filled in.
struct CUtensorMap {
    alignas(64) unsigned long long opaque[16];
};
