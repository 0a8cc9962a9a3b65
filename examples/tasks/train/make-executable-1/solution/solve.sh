#!/bin/bash
chmod +x wind.sh
