#pragma once
// NVRTC has size_t built in
